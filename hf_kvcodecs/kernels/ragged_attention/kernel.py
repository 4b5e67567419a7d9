"""Flash-decoding over segments of different lengths, and the merge of its splits."""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE: tl.constexpr = tl.constexpr(-1.0e30)  # below every score, and still finite: no inf - inf


@triton.jit
def _ragged_attention_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, counts_ptr, cursor_ptr, part_ptr, stat_ptr, scale, group,
    SPLITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One split of one head's rows. ``scale`` includes log2(e)."""
    head, split = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + head)  # int64
    rows = tl.load(counts_ptr + head) + tl.load(cursor_ptr) + 1
    chunk = tl.cdiv(tl.cdiv(rows, BLOCK_T), SPLITS) * BLOCK_T
    begin = split * chunk
    end = tl.minimum(begin + chunk, rows)
    offs_g, offs_d, offs_t = tl.arange(0, G), tl.arange(0, D), tl.arange(0, BLOCK_T)
    q_at = (head * group + offs_g[:, None]) * D + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=offs_g[:, None] < group, other=0.0)  # [G, D]
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full([G], NEGATIVE, tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    for first in range(begin, end, BLOCK_T):
        row = first + offs_t
        mask_t = row < end
        at = (start + row)[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + at, mask=mask_t[:, None], other=0.0)  # [BLOCK_T, D]
        v = tl.load(v_ptr + at, mask=mask_t[:, None], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [G, BLOCK_T]
        scores = tl.where(mask_t[None, :], scores, NEGATIVE)
        new_m = tl.maximum(m, tl.max(scores, 1))
        shrink = tl.exp2(m - new_m)
        weights = tl.where(mask_t[None, :], tl.exp2(scores - new_m[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        m = new_m
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
