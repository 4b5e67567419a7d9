"""Flash-decoding over packed blocks, raw blocks and the dense tail, and the merge of its splits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
from .softmax import by_lane, new_max, per_row

NEGATIVE: tl.constexpr = tl.constexpr(-1.0e30)  # below every score, and still finite: no inf - inf


@triton.jit
def _visible(position, query, start, WINDOW: tl.constexpr):
    """Whether tokens ``position`` are seen from tokens ``query`` (causal, left padding, window)."""
    seen = (position <= query) & (position >= start)
    if WINDOW:
        seen = seen & (position > query - WINDOW)
    return seen


@triton.jit
def _log2_scores(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores ``q . k`` times ``scale``, in powers of two; uncapped, ``scale`` includes log2(e)."""
    if SOFTCAP:
        x = tl.exp2(tl.abs(scores * scale) * (-2.0 * 1.4426950408889634 / softcap))
        tanh = tl.where(scores < 0, -1.0, 1.0) * (1 - x) / (1 + x)
        return tanh * (softcap * 1.4426950408889634)
    else:
        return scores * scale


@triton.jit
def _record_of_tile(meta_ptr, table, tile, end, lane, SLOT: tl.constexpr):
    """:func:`load_record` of tile number ``tile`` of a row; zeros for raw blocks and from ``end``
    on."""
    entry = tl.load(table + (tile >> 1), mask=tile < end, other=-1)
    slot = tl.maximum(entry, 0).to(tl.int64)
    return load_record(meta_ptr + slot * SLOT, tile & 1, lane, entry + 0 * lane >= 0)


@triton.jit
def _dense_tiles(
    acc, m, total, q, table, raw_ptr, raw_list, tail_k, tail_v, stride_kt, stride_vt,
    first_raw, step, raw_tiles, first_tail, tail_tiles, tail_tokens, sealed, scale, softcap,
    position_q, start, lane,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, RING: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The running softmax with dense tiles of 64 tokens added: ``raw_tiles`` of the raw blocks,
    every ``step``-th, then ``tail_tiles`` of the tail, where a token's place is its number modulo
    ``RING`` if that is not 0."""
    offs_t = tl.arange(0, 64)
    offs_d = tl.arange(0, D)
    for d in tl.range(0, raw_tiles + tail_tiles, num_stages=1):
        in_tail = d >= raw_tiles
        raw_tile = first_raw + d * step
        block = tl.load(raw_list + raw_tile // 2, mask=d < raw_tiles, other=0)
        slot = -1 - tl.load(table + block, mask=d < raw_tiles, other=-1).to(tl.int64)
        token = tl.where(in_tail, (first_tail + d - raw_tiles) * 64, (raw_tile % 2) * 64)
        first = tl.where(in_tail, sealed, block) * 128 + token
        # A raw block that this row does not count as sealed is none of its tokens.
        mask_t = token + offs_t < tl.where(in_tail, tail_tokens, tl.where(block < sealed, 128, 0))
        mask = mask_t[:, None] & (offs_d < HEAD_DIM)[None, :]
        raw = raw_ptr + slot * (256 * HEAD_DIM) + token * HEAD_DIM
        place = token.to(tl.int64)
        if RING:
            place = (first % RING).to(tl.int64)
        k_at = tl.where(in_tail, tail_k + place * stride_kt, raw)
        v_at = tl.where(in_tail, tail_v + place * stride_vt, raw + 128 * HEAD_DIM)
        # The op sees to it that rows begin at multiples of 16 bytes.
        k_at = tl.multiple_of(k_at, 16)
        v_at = tl.multiple_of(v_at, 16)
        k_rows = tl.multiple_of(offs_t * tl.where(in_tail, stride_kt, HEAD_DIM), 8)
        v_rows = tl.multiple_of(offs_t * tl.where(in_tail, stride_vt, HEAD_DIM), 8)
        keys = tl.load(k_at + k_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)  # [64, D]
        # Through registers: with keys and weights in turn in one piece of shared memory, ptxas 12
        # computes the second one's descriptor from a register that it never sets.
        keys = tl.where(mask, keys, 0.0)
        values = tl.load(v_at + v_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        if UPCAST:
            scores = tl.dot(keys.to(tl.float32), q.to(tl.float32))
        else:
            scores = tl.dot(keys, q)
        scores = _log2_scores(scores, scale, softcap, SOFTCAP)
        seen = _visible((first + offs_t)[:, None], position_q[None, :], start, WINDOW)
        scores = tl.where(seen & mask_t[:, None], scores, float("-inf"))
        # Plainly: each use of the faster way takes shared memory of its own.
        m, alpha = new_max(scores, m, 1.0, lane, N, False)
        alpha = per_row(alpha)
        p = tl.exp2(by_lane(scores, 64, N) - per_row(m))
        total = total * alpha + p
        p = tl.reshape(p, [64, N])
        acc = tl.reshape(by_lane(acc, D, N) * alpha, [D, N])
        if UPCAST:
            acc = tl.dot(tl.trans(values.to(tl.float32)), p, acc)
        else:
            acc = tl.dot(tl.trans(values), p.to(tl.bfloat16), acc)
    return acc, m, total


@triton.jit(
    do_not_specialize=[
        "lengths",
        "sealed_blocks",
        "starts",
        "softcap",
        "scale",
        "kv_heads",
        "q_heads",
        "q_tokens",
        "table_blocks",
        "splits",
    ]
)
def _packed_attention_kernel(
    q_ptr, words_ptr, pool_ptr, table_ptr, raw_ptr, raw_list_ptr, raw_count_ptr,
    tail_k_ptr, tail_v_ptr, lengths, sealed_blocks, starts, part_ptr, stat_ptr,
    scale, softcap, kv_heads, q_heads, q_tokens, table_blocks, splits,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    LENGTHS: tl.constexpr, SEALED: tl.constexpr, STARTS: tl.constexpr,
    WINDOW: tl.constexpr, EDGES: tl.constexpr, SOFTCAP: tl.constexpr,
    PACKED: tl.constexpr, SLOT: tl.constexpr, RING: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr, WGMMA: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = D // 64
    CHUNK: tl.constexpr = 256 * GROUPS
    META: tl.constexpr = 22 * CHUNK
    split = tl.program_id(0)
    row = tl.program_id(1)
    batch = row // kv_heads
    kv_head = row % kv_heads
    group = q_heads // kv_heads
    offs_n = tl.program_id(2) * N + tl.arange(0, N)
    offs_d = tl.arange(0, D)
    mask_n = offs_n < group * q_tokens
    query = offs_n // group

    # Each is either one number for all rows or a tensor with one per row.
    if LENGTHS:
        length = tl.load(lengths + batch)
    else:
        length = lengths
    if SEALED:
        sealed = tl.load(sealed_blocks + batch)
    else:
        sealed = sealed_blocks
    if STARTS:
        start = tl.load(starts + batch)
    else:
        start = starts
    position_q = length - q_tokens + query  # [N]
    oldest = start
    if WINDOW:
        oldest = tl.maximum(oldest, length - q_tokens + 1 - WINDOW)
    lane = tl.arange(0, 128)
    table = table_ptr + row.to(tl.int64) * table_blocks

    # Every split gets as many tiles, packed ones first, then the tail's; raw blocks' are dealt out
    # beside them, from the last split backwards.
    tail_tokens = length - sealed * 128
    if PACKED:
        first_tile = oldest // 64
        count = tl.maximum(sealed * 2 - first_tile, 0)
    else:
        first_tile = 0
        count = 0
    tiles = (count + (tail_tokens + 63) // 64).to(tl.int64)
    from_tile = tiles * split // splits
    to_tile = tiles * (split + 1) // splits
    if PACKED:
        # Records run two tiles ahead of the arithmetic, what they point at one. Early: the first
        # ones are waited for.
        begin = first_tile + tl.minimum(from_tile, count).to(tl.int32)
        end = first_tile + tl.minimum(to_tile, count).to(tl.int32)
        record = _record_of_tile(words_ptr + META, table, begin, end, lane, SLOT)
        next_record = _record_of_tile(words_ptr + META, table, begin + 1, end, lane, SLOT)
        extras = load_extras(pool_ptr, record, lane, GROUPS, PTX)

    q_head = kv_head * group + offs_n % group
    q_col = batch.to(tl.int64) * stride_qb + q_head.to(tl.int64) * stride_qh + query * stride_qt
    q = tl.load(
        q_ptr + q_col[None, :] + offs_d[:, None],
        mask=mask_n[None, :] & (offs_d < HEAD_DIM)[:, None],
        other=0.0,
    )  # [D, N]
    acc = tl.zeros([D, N], tl.float32)
    m = tl.full([4, 8, N], NEGATIVE, tl.float32)
    total = tl.zeros([1, 4, 2, 8, N], tl.float32)
    first_raw = splits - 1 - split
    raw_tiles = tl.maximum(2 * tl.load(raw_count_ptr + row) - first_raw + splits - 1, 0) // splits
    first_tail = tl.maximum(from_tile - count, 0).to(tl.int32)
    last_tail = tl.maximum(to_tile - count, 0).to(tl.int32)
    tail_k = tail_k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    tail_v = tail_v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    offs_t = tl.arange(0, 64)
    acc, m, total = _dense_tiles(
        acc, m, total, q, table, raw_ptr, raw_list_ptr + row.to(tl.int64) * table_blocks,
        tail_k, tail_v, stride_kt, stride_vt, first_raw, splits, raw_tiles,
        first_tail, last_tail - first_tail, tail_tokens, sealed, scale, softcap,
        position_q, start, lane,
        HEAD_DIM, D, N, WINDOW, SOFTCAP, RING, UPCAST,
    )  # fmt: skip
    if PACKED:
        for t in tl.range(begin, end, num_stages=STAGES):
            # First: ptxas moves no load of words behind the barriers in here, and runs out of
            # registers.
            escapes, own = escape_words(pool_ptr, record, extras, lane, GROUPS, PTX)
            entry = tl.load(table + (t >> 1))
            slot = tl.maximum(entry, 0).to(tl.int64)
            tile = words_ptr + slot * SLOT + (t & 1) * (11 * CHUNK)
            k0 = load_chunk(tile, lane, GROUPS)
            k1 = load_chunk(tile + CHUNK, lane, GROUPS)
            k2 = load_chunk(tile + 2 * CHUNK, lane, GROUPS)
            k3 = load_chunk(tile + 3 * CHUNK, lane, GROUPS)
            v0 = load_chunk(tile + 4 * CHUNK, lane, GROUPS)
            v1 = load_chunk(tile + 5 * CHUNK, lane, GROUPS)
            v2 = load_chunk(tile + 6 * CHUNK, lane, GROUPS)
            v3 = load_chunk(tile + 7 * CHUNK, lane, GROUPS)
            h0 = load_chunk(tile + 8 * CHUNK, lane, GROUPS)
            h1 = load_chunk(tile + 9 * CHUNK, lane, GROUPS)
            h2 = load_chunk(tile + 10 * CHUNK, lane, GROUPS)
            meta = words_ptr + slot * SLOT + META
            factors = tl.load(meta + 16 + tl.arange(0, 32 * GROUPS))
            factors = tl.reshape(factors, [4, 8 * GROUPS])
            low_base, high_base = lane_bases(meta + 16 + D // 2, lane, GROUPS)
            next_extras = load_extras(pool_ptr, next_record, lane, GROUPS, PTX)
            ahead = _record_of_tile(words_ptr + META, table, t + 2, end, lane, SLOT)

            place, counts = record_parts(record)
            key_patches, patches = patch_counts(counts)
            n0, n1, n2, n3 = nibble_words(h0, h1, h2, escapes, PTX)
            kn0, vn0 = kinds(n0, GROUPS)
            kn1, vn1 = kinds(n1, GROUPS)
            kn2, vn2 = kinds(n2, GROUPS)
            kn3, vn3 = kinds(n3, GROUPS)
            keys = register_keys(
                k0, k1, k2, k3, kn0, kn1, kn2, kn3, factors,
                place * 0, key_patches, own, pool_ptr, place, lane, GROUPS, PTX,
            )  # [64, D]  # fmt: skip
            if UPCAST:
                scores = tl.dot(keys.to(tl.float32), q.to(tl.float32))
            else:
                scores = tl.dot(keys, q)
            if SOFTCAP:
                scores = _log2_scores(scores, scale, softcap, SOFTCAP)
                score_scale = 1.0
            else:
                score_scale = scale
            # A raw block has another's slot here: it must not count.
            if EDGES == 0:
                scores = tl.where(entry < 0, float("-inf"), scores)
            else:
                token = t * 64 + offs_t
                if EDGES == 1:
                    seen = (token >= oldest)[:, None]
                else:
                    seen = _visible(token[:, None], position_q[None, :], start, WINDOW)
                scores = tl.where(seen & (entry >= 0), scores, float("-inf"))
            m, alpha = new_max(scores, m, score_scale, lane, N, WGMMA)
            alpha = per_row(alpha)
            p = tl.exp2(by_lane(scores, 64, N) * score_scale - per_row(m))
            total = total * alpha + p
            p = tl.reshape(p, [64, N])
            acc = tl.reshape(by_lane(acc, D, N) * alpha, [D, N])
            values = register_values(
                v0, v1, v2, v3, vn0, vn1, vn2, vn3, low_base, high_base,
                key_patches, patches, own, pool_ptr, place, lane, GROUPS, PTX,
            )  # [D, 64]  # fmt: skip
            if UPCAST:
                acc = tl.dot(values.to(tl.float32), p, acc)
            else:
                acc = tl.dot(values, p.to(tl.bfloat16), acc)
            extras = next_extras
            # Triton pipelines no loop that hands a value on as it is: hence the idle mask.
            record = next_record & ~(1 << 31)
            next_record = ahead

    if PDL:
        gdc_launch_dependents()
    out = (row.to(tl.int64) * (group * q_tokens) + offs_n) * splits + split
    tl.store(
        part_ptr + out[None, :] * HEAD_DIM + offs_d[:, None],
        acc,
        mask=mask_n[None, :] & (offs_d < HEAD_DIM)[:, None],
    )
    tl.store(stat_ptr + out * 2, tl.max(tl.max(m, 1), 0), mask=mask_n)
    tl.store(stat_ptr + out * 2 + 1, tl.sum(tl.reshape(total, [64, N]), 0), mask=mask_n)


@triton.jit(do_not_specialize=["ends", "lengths", "kv_heads", "q_heads", "q_tokens", "splits"])
def _merge_kernel(
    part_ptr, stat_ptr, sinks_ptr, lost_ptr, starts_ptr, ends, lengths, out_ptr,
    kv_heads, q_heads, q_tokens, splits, stride_ob, stride_oh, stride_ot,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr,
    SINKS: tl.constexpr, LOST: tl.constexpr, ENDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The softmax over all splits of one query head and token, attention sinks included."""
    row = tl.program_id(0)
    column = tl.program_id(1)
    group = q_heads // kv_heads
    offs_s = tl.arange(0, S)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_s = offs_s < splits
    mask = mask_s[:, None] & (offs_d < HEAD_DIM)[None, :]
    if PDL:
        gdc_wait()
    at = (row.to(tl.int64) * (group * q_tokens) + column) * splits + offs_s
    m = tl.load(stat_ptr + at * 2, mask=mask_s, other=-1.0e30)
    total = tl.load(stat_ptr + at * 2 + 1, mask=mask_s, other=0.0)
    part = tl.load(part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
    q_head = (row % kv_heads) * group + column % group
    highest = tl.max(m, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(m - highest)
    denominator = tl.sum(total * weight, 0)
    if SINKS:
        denominator += tl.exp2(sink - highest)
    result = tl.sum(part * weight[:, None], 0) / tl.where(denominator == 0, 1.0, denominator)
    if LOST:
        wrong = tl.load(lost_ptr) > 0
        if ENDS:
            batch = row // kv_heads
            wrong = wrong | (tl.load(starts_ptr + batch) < 0)
            wrong = wrong | (tl.load(ends + batch) != tl.load(lengths + batch))
        result = tl.where(wrong, float("nan"), result)
    offset = (row // kv_heads).to(tl.int64) * stride_ob + q_head.to(tl.int64) * stride_oh
    offset += (column // group).to(tl.int64) * stride_ot
    tl.store(out_ptr + offset + offs_d, result.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
