"""Packed blocks in the ``register`` word order to dense ones, one program per block."""

from __future__ import annotations

import triton
import triton.language as tl

from ..register_words import (
    escape_words,
    kinds,
    lane_bases,
    load_chunk,
    load_extras,
    load_record,
    nibble_words,
    patch_counts,
    record_parts,
    register_keys,
    register_values,
)


@triton.jit(do_not_specialize=["first_block", "table_blocks", "kv_heads"])
def _unpack_kernel(
    words_ptr, pool_ptr, raw_ptr, table_ptr, key_ptr, value_ptr, first_block, table_blocks,
    kv_heads,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr,
    PACKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = D // 64
    CHUNK: tl.constexpr = 256 * GROUPS
    META: tl.constexpr = 22 * CHUNK
    row = tl.program_id(0)
    block = tl.program_id(1)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    key = key_ptr + batch * stride_kb + head * stride_kh + block.to(tl.int64) * 128 * stride_kt
    value = value_ptr + batch * stride_vb + head * stride_vh + block.to(tl.int64) * 128 * stride_vt
    offs_d = tl.arange(0, D)
    entry = tl.load(table_ptr + row.to(tl.int64) * table_blocks + first_block + block)
    if entry < 0:
        raw = raw_ptr + (-1 - entry).to(tl.int64) * (256 * HEAD_DIM)
        mask_d = (offs_d < HEAD_DIM)[None, :]
        for part in range(4):
            offs_t = (part * 32 + tl.arange(0, 32))[:, None]
            x = tl.load(raw + offs_t * HEAD_DIM + offs_d[None, :], mask=mask_d, other=0)
            tl.store(key + offs_t * stride_kt + offs_d[None, :], x, mask=mask_d)
            x = tl.load(raw + (128 + offs_t) * HEAD_DIM + offs_d[None, :], mask=mask_d, other=0)
            tl.store(value + offs_t * stride_vt + offs_d[None, :], x, mask=mask_d)
    elif PACKED:
        lane = tl.arange(0, 128)
        offs_t = tl.arange(0, 64)
        slot = words_ptr + entry.to(tl.int64) * SLOT
        meta = slot + META
        low_base, high_base = lane_bases(meta + 16 + D // 2, lane, GROUPS)
        offs_f = tl.arange(0, 4)[:, None] * (8 * GROUPS) + tl.arange(0, 8 * GROUPS)[None, :]
        factors = tl.load(meta + 16 + offs_f)
        for tile in tl.static_range(2):
            words = slot + tile * (11 * CHUNK)
            record = load_record(meta, tile, lane, lane >= 0)
            place, counts = record_parts(record)
            key_patches, patches = patch_counts(counts)
            extras = load_extras(pool_ptr, record, lane, GROUPS, PTX)
            escapes, own = escape_words(pool_ptr, record, extras, lane, GROUPS, PTX)
            n0, n1, n2, n3 = nibble_words(
                load_chunk(words + 8 * CHUNK, lane, GROUPS),
                load_chunk(words + 9 * CHUNK, lane, GROUPS),
                load_chunk(words + 10 * CHUNK, lane, GROUPS), escapes, PTX,
            )  # fmt: skip
            kn0, vn0 = kinds(n0, GROUPS)
            kn1, vn1 = kinds(n1, GROUPS)
            kn2, vn2 = kinds(n2, GROUPS)
            kn3, vn3 = kinds(n3, GROUPS)
            x = register_keys(
                load_chunk(words, lane, GROUPS), load_chunk(words + CHUNK, lane, GROUPS),
                load_chunk(words + 2 * CHUNK, lane, GROUPS),
                load_chunk(words + 3 * CHUNK, lane, GROUPS), kn0, kn1, kn2, kn3, factors,
                place * 0, key_patches, own, pool_ptr, place, lane, GROUPS, PTX,
            )  # fmt: skip
            at = key + (tile * 64 + offs_t)[:, None] * stride_kt + offs_d[None, :]
            tl.store(at, x.to(tl.int16, bitcast=True))
            x = register_values(
                load_chunk(words + 4 * CHUNK, lane, GROUPS),
                load_chunk(words + 5 * CHUNK, lane, GROUPS),
                load_chunk(words + 6 * CHUNK, lane, GROUPS),
                load_chunk(words + 7 * CHUNK, lane, GROUPS),
                vn0, vn1, vn2, vn3, low_base, high_base,
                key_patches, patches, own, pool_ptr, place, lane, GROUPS, PTX,
            )  # fmt: skip
            at = value + (tile * 64 + offs_t)[None, :] * stride_vt + offs_d[:, None]
            tl.store(at, x.to(tl.int16, bitcast=True))
