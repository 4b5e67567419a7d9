"""Attention of one token over what each head has kept: segments of one flat buffer, as long as each
head's selection, with a tail whose length is on the device."""

from __future__ import annotations

import functools
import math

import torch

from ..dispatch import interpreted, on_device, triton_missing
from .reference import ragged_attention_reference
from .segments import CODES, PackedSegments

__all__ = ["PackedSegments", "ragged_attention", "ragged_attention_works", "unsupported_reason"]

HEAD_DIMS = (64, 128, 256)
GROUP_LIMIT = 16
PROGRAMS = 264  # two for each of an H200's processors
BLOCK_T = 64
WARPS, PACKED_WARPS = 4, 8  # decoding is arithmetic


def unsupported_reason(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> str | None:
    """Why :func:`ragged_attention` cannot take these, or None."""
    missing = triton_missing(q.device)
    if missing:
        return missing
    if q.dtype != keys.dtype or q.dtype != values.dtype:
        return f"different dtypes: {q.dtype}, {keys.dtype}, {values.dtype}"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype}"
    if keys.shape != values.shape or keys.shape[1] not in HEAD_DIMS:
        return f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
    if q.shape[1] > GROUP_LIMIT:
        return f"{q.shape[1]} query heads to a KV head"
    return None


def ragged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    cursor: torch.Tensor,
    scale: float,
    packed: PackedSegments | None = None,
) -> torch.Tensor:
    """What one token attends to, in two launches of fixed shape: made for CUDA graphs.

    Args:
        q: ``[kv_heads, group, head_dim]``, contiguous.
        keys, values: ``[rows, head_dim]``, contiguous: all heads' segments.
        starts: int64 ``[kv_heads]``: the first row of each head.
        counts: int64 ``[kv_heads]``: rows of each head before its tail.
        cursor: int64 ``[1]``: the newest row of the tails; head ``h`` sees rows
            ``starts[h] .. starts[h] + counts[h] + cursor``.
        scale: of the products.
        packed: quantised tokens that each head sees as well; they are decoded to ``q``'s dtype as
            they are read.

    Returns:
        ``[kv_heads, group, head_dim]`` of ``q``'s dtype.

    Raises:
        ValueError: what :func:`unsupported_reason` names, or tensors that are not contiguous.
    """
    reason = unsupported_reason(q, keys, values)
    if reason is None and packed is not None:
        reason = packed.unsupported_reason(q.shape[2])
    if reason is not None:
        raise ValueError(f"ragged_attention cannot take {reason}")
    if not (q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("q, keys, values: expected contiguous tensors; call .contiguous()")
    from .kernel import _ragged_attention_kernel, _ragged_merge_kernel

    heads, group, head_dim = q.shape
    # A power of two, for the merge holds all splits at once.
    splits = 1 << max((PROGRAMS // heads).bit_length() - 1, 0)
    splits = min(splits, 128)
    part = torch.empty((heads, splits, GROUP_LIMIT, head_dim), device=q.device)
    stat = torch.empty((heads, splits, GROUP_LIMIT, 2), device=q.device)
    out = torch.empty_like(q)
    # Without quantised tokens their places are filled by what is at hand; none is read.
    quantised = 8 * (counts,) if packed is None else packed.tensors
    tokens = 0 if packed is None else packed.tokens
    with on_device(q.device):
        _ragged_attention_kernel[(heads, splits)](
            q, keys, values, starts, counts, cursor, *quantised, tokens // CODES, tokens,
            part, stat, scale * math.log2(math.e), group,
            SPLITS=splits, G=GROUP_LIMIT, D=head_dim, BLOCK_T=BLOCK_T if head_dim < 256 else 32,
            BITS=0 if packed is None else packed.bits, UPCAST=interpreted(),
            num_warps=WARPS if packed is None else PACKED_WARPS,
        )  # fmt: skip
        _ragged_merge_kernel[(heads, group)](
            part, stat, out, group, SPLITS=splits, G=GROUP_LIMIT, D=head_dim, num_warps=4
        )
    return out


@functools.cache
def ragged_attention_works(
    device: torch.device, dtype: torch.dtype, head_dim: int, bits: int = 0
) -> bool:
    """Whether the kernel gives on ``device`` what the reference does, over quantised tokens too
    with ``bits``; tried once in a process."""
    if device.type != "cuda":  # elsewhere it is interpreted, for tests only
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    q, keys, values = (
        torch.randn(shape, generator=generator).to(dtype).to(device)
        for shape in ((2, 4, head_dim), (700, head_dim), (700, head_dim))
    )
    starts, counts = (torch.tensor(x, device=device) for x in ([0, 500], [430, 90]))
    given = q, keys, values, starts, counts, torch.tensor([7], device=device), 0.1
    try:
        packed = _random_segments([96, 192], head_dim, bits, generator, device) if bits else None
        out = ragged_attention(*given, packed)
        expected = ragged_attention_reference(*given, packed)
        return bool((out.float() - expected).abs().max() < 0.02)
    except Exception:  # a compiler's errors have no common class
        return False


def _random_segments(
    counts: list[int], head_dim: int, bits: int, generator: torch.Generator, device: torch.device
) -> PackedSegments:
    """Two heads' quantised tokens, for trying the kernel."""
    tokens, words, parts = sum(counts), head_dim // CODES, {}
    for kind, shape in (("key", (tokens // CODES, head_dim)), ("value", (tokens, words))):
        parts[f"{kind}_words"] = torch.randint(
            -(2**31), 2**31, (bits, *shape), generator=generator
        ).int()
        scale = torch.rand(shape, generator=generator) * 2**-bits
        parts[f"{kind}_scale"] = scale.half()
        parts[f"{kind}_minimum"] = -torch.rand(shape, generator=generator).half()
    parts |= {"starts": torch.tensor([0, counts[0]]), "counts": torch.tensor(counts)}
    return PackedSegments(**{name: part.to(device) for name, part in parts.items()})
