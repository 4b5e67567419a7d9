"""Flash-decoding over segments of different lengths, quantised ones among them, and the merge of
its splits."""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE: tl.constexpr = tl.constexpr(-1.0e30)  # below every score, and still finite: no inf - inf


@triton.jit
def _key_codes(words, BITS: tl.constexpr):
    """``[tokens, D]`` of words ``[tokens * BITS // 32, D]``, one behind the other by channel."""
    N: tl.constexpr = 32 // BITS
    shifts = (tl.arange(0, N) * BITS)[None, :, None]
    codes = (words[:, None, :] >> shifts) & ((1 << BITS) - 1)
    return tl.reshape(codes, [words.shape[0] * N, words.shape[1]])


@triton.jit
def _value_codes(words, BITS: tl.constexpr):
    """``[tokens, D]`` of words ``[tokens, D * BITS // 32]``, one behind the other by token."""
    N: tl.constexpr = 32 // BITS
    shifts = (tl.arange(0, N) * BITS)[None, None, :]
    codes = (words[:, :, None] >> shifts) & ((1 << BITS) - 1)
    return tl.reshape(codes, [words.shape[0], words.shape[1] * N])


@triton.jit
def _of_32_rows(x):
    """``[n, D]`` with every row 32 times."""
    n: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], [n, 32, D]), [n * 32, D])


@triton.jit
def _of_32_columns(x):
    """``[T, n]`` with every column 32 times."""
    T: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], [T, n, 32]), [T, n * 32])


@triton.jit
def _packed_tile(
    token, end, key_words, key_scale, key_minimum, value_words, value_scale, value_minimum,
    key_groups, tokens, BITS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Keys and values ``[BLOCK_T, D]``, fp32, of quantised tokens from ``token`` on, a multiple of
    32; those from ``end`` on are 0."""
    offs_d = tl.arange(0, D)
    group = (token // 32 + tl.arange(0, BLOCK_T // 32)).to(tl.int64)
    at = group[:, None] * D + offs_d[None, :]
    mask = (group < end // 32)[:, None]
    scale = tl.load(key_scale + at, mask=mask, other=0.0)
    minimum = tl.load(key_minimum + at, mask=mask, other=0.0)
    word = tl.arange(0, BLOCK_T // 32 * BITS)
    group = (token // 32 + word // BITS).to(tl.int64)
    at = (word % BITS).to(tl.int64) * key_groups + group
    mask = (group < end // 32)[:, None]
    words = tl.load(key_words + at[:, None] * D + offs_d[None, :], mask=mask, other=0)
    keys = _key_codes(words, BITS).to(tl.float32)
    keys = keys * _of_32_rows(scale).to(tl.float32) + _of_32_rows(minimum).to(tl.float32)

    row = (token + tl.arange(0, BLOCK_T)).to(tl.int64)
    mask = (row < end)[:, None]
    at = row[:, None] * (D // 32) + tl.arange(0, D // 32)[None, :]
    scale = tl.load(value_scale + at, mask=mask, other=0.0)
    minimum = tl.load(value_minimum + at, mask=mask, other=0.0)
    word = tl.arange(0, D // 32 * BITS)
    at = ((word % BITS).to(tl.int64)[None, :] * tokens + row[:, None]) * (D // 32)
    words = tl.load(value_words + at + (word // BITS)[None, :], mask=mask, other=0)
    values = _value_codes(words, BITS).to(tl.float32)
    values = values * _of_32_columns(scale).to(tl.float32)
    return keys, values + _of_32_columns(minimum).to(tl.float32)


@triton.jit
def _add_tile(q, k, v, mask_t, m, total, acc, scale):
    """The running softmax with one tile added."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [G, BLOCK_T]
    scores = tl.where(mask_t[None, :], scores, NEGATIVE)
    new_m = tl.maximum(m, tl.max(scores, 1))
    shrink = tl.exp2(m - new_m)
    weights = tl.where(mask_t[None, :], tl.exp2(scores - new_m[:, None]), 0.0)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_m, total, acc


@triton.jit(do_not_specialize=["key_groups", "tokens"])
def _ragged_attention_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, counts_ptr, cursor_ptr,
    key_words_ptr, key_scale_ptr, key_minimum_ptr,
    value_words_ptr, value_scale_ptr, value_minimum_ptr,
    packed_starts_ptr, packed_counts_ptr, key_groups, tokens,
    part_ptr, stat_ptr, scale, group,
    SPLITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
    BITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One split of one head's rows: of its quantised ones (``BITS`` not 0), and of the others.
    ``scale`` includes log2(e)."""
    head, split = tl.program_id(0), tl.program_id(1)
    offs_g, offs_d, offs_t = tl.arange(0, G), tl.arange(0, D), tl.arange(0, BLOCK_T)
    q_at = (head * group + offs_g[:, None]) * D + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=offs_g[:, None] < group, other=0.0)  # [G, D]
    dtype = q.dtype
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full([G], NEGATIVE, tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    if BITS:
        first_token = tl.load(packed_starts_ptr + head)
        packed = tl.load(packed_counts_ptr + head)
        chunk = tl.cdiv(tl.cdiv(packed, BLOCK_T), SPLITS) * BLOCK_T
        begin = split * chunk
        end = tl.minimum(begin + chunk, packed)
        for first in range(begin, end, BLOCK_T):
            k, v = _packed_tile(
                first_token + first, first_token + end, key_words_ptr, key_scale_ptr,
                key_minimum_ptr, value_words_ptr, value_scale_ptr, value_minimum_ptr,
                key_groups, tokens, BITS, D, BLOCK_T,
            )  # fmt: skip
            k, v = k.to(dtype), v.to(dtype)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            m, total, acc = _add_tile(q, k, v, first + offs_t < end, m, total, acc, scale)
    start = tl.load(starts_ptr + head)  # int64
    rows = tl.load(counts_ptr + head) + tl.load(cursor_ptr) + 1
    chunk = tl.cdiv(tl.cdiv(rows, BLOCK_T), SPLITS) * BLOCK_T
    begin = split * chunk
    end = tl.minimum(begin + chunk, rows)
    for first in range(begin, end, BLOCK_T):
        row = first + offs_t
        mask_t = row < end
        at = (start + row)[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + at, mask=mask_t[:, None], other=0.0)  # [BLOCK_T, D]
        v = tl.load(v_ptr + at, mask=mask_t[:, None], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        m, total, acc = _add_tile(q, k, v, mask_t, m, total, acc, scale)
    base = (head * SPLITS + split) * G
    tl.store(part_ptr + (base + offs_g[:, None]) * D + offs_d[None, :], acc)
    tl.store(stat_ptr + (base + offs_g) * 2, m)
    tl.store(stat_ptr + (base + offs_g) * 2 + 1, total)


@triton.jit
def _ragged_merge_kernel(
    part_ptr, stat_ptr, out_ptr, group,
    SPLITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one query head."""
    head, g = tl.program_id(0), tl.program_id(1)
    offs_s, offs_d = tl.arange(0, SPLITS), tl.arange(0, D)
    at = (head * SPLITS + offs_s) * G + g  # [SPLITS]
    m, total = tl.load(stat_ptr + at * 2), tl.load(stat_ptr + at * 2 + 1)
    factor = tl.exp2(m - tl.max(m, 0))
    part = tl.load(part_ptr + at[:, None] * D + offs_d[None, :])  # [SPLITS, D]
    out = tl.sum(part * factor[:, None], 0) / tl.sum(total * factor, 0)
    out_at = (head * group + g) * D + offs_d
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty))
