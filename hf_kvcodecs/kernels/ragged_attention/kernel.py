"""Flash-decoding over segments of different lengths, quantised ones among them, and the merge of
its splits."""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE: tl.constexpr = tl.constexpr(-1.0e30)  # below every score, and still finite: no inf - inf


@triton.jit
def _number(words, scale, minimum, PLACE: tl.constexpr, BITS: tl.constexpr):
    """What code ``PLACE`` of each word stands for. On top of the mantissa of 1 a code ``c`` is
    ``1 + c / 2**BITS``, with no conversion; ``scale`` and ``minimum`` are for that."""
    LEFT: tl.constexpr = 23 - BITS - BITS * PLACE
    moved = words << LEFT if LEFT >= 0 else words >> -LEFT
    moved = (moved & (((1 << BITS) - 1) << (23 - BITS))) | 0x3F800000
    return moved.to(tl.float32, bitcast=True) * scale + minimum


@triton.jit
def _numbers_2(words, scale, minimum, PLACE: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    first = _number(words, scale, minimum, PLACE, BITS)
    return tl.join(first, _number(words, scale, minimum, PLACE + STEP, BITS))


@triton.jit
def _numbers_4(words, scale, minimum, PLACE: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    first = _numbers_2(words, scale, minimum, PLACE, 2 * STEP, BITS)
    return tl.join(first, _numbers_2(words, scale, minimum, PLACE + STEP, 2 * STEP, BITS))


@triton.jit
def _numbers_8(words, scale, minimum, PLACE: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    first = _numbers_4(words, scale, minimum, PLACE, 2 * STEP, BITS)
    return tl.join(first, _numbers_4(words, scale, minimum, PLACE + STEP, 2 * STEP, BITS))


@triton.jit
def _numbers(words, scale, minimum, BITS: tl.constexpr):
    """``[A, BITS, C, 32 // BITS]``, fp32, of words ``[A, BITS, C]``; ``scale`` and ``minimum``
    ``[A, 1, C]``. A thread decodes whole words: what it needs is in its registers."""
    A: tl.constexpr = words.shape[0]
    C: tl.constexpr = words.shape[2]
    scale = scale.to(tl.float32) * (1 << BITS)
    minimum = minimum.to(tl.float32) - scale
    if BITS == 8:
        numbers = _numbers_4(words, scale, minimum, 0, 1, BITS)
    elif BITS == 4:
        numbers = _numbers_8(words, scale, minimum, 0, 1, BITS)
    else:
        first = _numbers_8(words, scale, minimum, 0, 2, BITS)
        numbers = tl.join(first, _numbers_8(words, scale, minimum, 1, 2, BITS))
    return tl.reshape(numbers, [A, BITS, C, 32 // BITS])


@triton.jit
def _packed_tile(
    token, end, key_words, key_scale, key_minimum, value_words, value_scale, value_minimum,
    key_groups, tokens, dtype: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Keys and values ``[BLOCK_T, D]`` of quantised tokens from ``token`` on, a multiple of 32;
    those from ``end`` on are of no use."""
    word = tl.arange(0, BITS)[None, :, None]
    group = (token // 32 + tl.arange(0, BLOCK_T // 32)).to(tl.int64)[:, None, None]
    mask = group < end // 32
    at = group * D + tl.arange(0, D)[None, None, :]
    scale = tl.load(key_scale + at, mask=mask, other=0.0)
    minimum = tl.load(key_minimum + at, mask=mask, other=0.0)
    words = tl.load(key_words + word * key_groups.to(tl.int64) * D + at, mask=mask, other=0)
    keys = _numbers(words, scale, minimum, BITS).to(dtype)  # [groups, BITS, D, 32 // BITS]
    keys = tl.reshape(tl.permute(keys, [0, 1, 3, 2]), [BLOCK_T, D])

    row = (token + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
    mask = row < end
    at = row * (D // 32) + tl.arange(0, D // 32)[None, None, :]
    scale = tl.load(value_scale + at, mask=mask, other=0.0)
    minimum = tl.load(value_minimum + at, mask=mask, other=0.0)
    at += word * tokens.to(tl.int64) * (D // 32)
    words = tl.load(value_words + at, mask=mask, other=0)
    values = _numbers(words, scale, minimum, BITS).to(dtype)  # [BLOCK_T, BITS, D // 32, ...]
    return keys, tl.reshape(tl.permute(values, [0, 2, 1, 3]), [BLOCK_T, D])


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
                key_groups, tokens, dtype, BITS, D, BLOCK_T,
            )  # fmt: skip
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
