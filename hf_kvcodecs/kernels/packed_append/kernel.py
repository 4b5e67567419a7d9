"""New tokens into a ring of dense ones, and the oldest 128 of them into a sealed block once there
are enough: one program per row of the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exponent_pack.kernel import seal_block


@triton.jit(
    do_not_specialize=["new_tokens", "max_tokens", "table_blocks", "pool_words", "raw_slots"]
)
def _append_kernel(
    key_ptr, value_ptr, ring_ptr, state_ptr, after_ptr, words_ptr, pool_ptr, raw_ptr, table_ptr,
    raw_list_ptr, raw_count_ptr, cursors_ptr, bases_ptr,
    new_tokens, max_tokens, table_blocks, pool_words, raw_slots, kv_heads,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    T: tl.constexpr, RING: tl.constexpr, SEAL_AT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    held = tl.load(state_ptr + row)
    sealed = tl.load(state_ptr + rows + row)
    fits = held + new_tokens <= max_tokens
    count = tl.where(fits, new_tokens, 0)
    length = held + count

    offs_t = tl.arange(0, T)
    offs_d = tl.arange(0, D)
    mask = (offs_t < count)[:, None] & (offs_d < HEAD_DIM)[None, :]
    place = ((held + offs_t) % RING)[:, None] * HEAD_DIM + offs_d[None, :]
    ring_k = ring_ptr + row.to(tl.int64) * (RING * HEAD_DIM)
    ring_v = ring_k + rows.to(tl.int64) * (RING * HEAD_DIM)
    key = key_ptr + batch * stride_kb + head * stride_kh
    value = value_ptr + batch * stride_vb + head * stride_vh
    x = tl.load(key + offs_t[:, None] * stride_kt + offs_d[None, :], mask=mask, other=0)
    tl.store(ring_k + place, x, mask=mask)
    x = tl.load(value + offs_t[:, None] * stride_vt + offs_d[None, :], mask=mask, other=0)
    tl.store(ring_v + place, x, mask=mask)

    full = length - sealed * 128 >= SEAL_AT
    if full:
        tl.debug_barrier()  # a block has tokens that other lanes wrote just now
        first = (sealed * 128 % RING) * HEAD_DIM
        seal_block(
            ring_k + first, ring_v + first, HEAD_DIM, HEAD_DIM, row, sealed,
            bases_ptr + row.to(tl.int64) * (2 * D), words_ptr, pool_ptr, raw_ptr, table_ptr,
            raw_list_ptr, raw_count_ptr, cursors_ptr, raw_list_ptr, table_blocks, pool_words,
            raw_slots, HEAD_DIM, D, SLOT, True, 0,
        )  # fmt: skip
    sealed += full.to(tl.int32)
    tl.store(state_ptr + row, length)
    tl.store(state_ptr + rows + row, sealed)
    if head == 0:
        tl.store(after_ptr + batch, length)
        tl.store(after_ptr + rows // kv_heads + batch, sealed)
    if not fits:
        tl.atomic_add(cursors_ptr + 2, 1)
