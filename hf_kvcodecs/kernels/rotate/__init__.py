"""Keys moved to other positions: the rotation by the difference of two rotary angles."""

from __future__ import annotations

import torch

from .reference import angles_between as angles_between
from .reference import rotate as _rotate


def rotate(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``keys`` rotated pair by pair, computed in float32 and rounded once to the keys' dtype.

    Args:
        keys: ``[..., tokens, head_dim]``, floating point, any strides.
        cos: float32 ``[tokens, pairs]``, see :func:`angles_between`.
        sin: the same.
        interleaved: pairs are neighbouring channels (GLM, DeepSeek) instead of the two halves of
            the rotated channels (Llama and most others).
        start: the first rotated channel; ``2 * pairs`` channels from there are rotated.
        out: where the result goes, like ``keys`` but of other memory; None for a new tensor.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    pairs = cos.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2 or keys.shape[-2] != cos.shape[0]:
        raise ValueError(
            f"rotate: expected cos and sin [tokens, pairs] with tokens of keys "
            f"{tuple(keys.shape)}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or not keys.is_floating_point():
        raise ValueError(
            f"rotate: expected floating-point keys and float32 angles, got {keys.dtype}, "
            f"{cos.dtype}, {sin.dtype}"
        )
    if start < 0 or start + 2 * pairs > keys.shape[-1]:
        raise ValueError(
            f"rotate: {pairs} pairs from channel {start} on do not fit head_dim {keys.shape[-1]}"
        )
    out = torch.empty_like(keys, memory_format=torch.contiguous_format) if out is None else out
    if out.shape != keys.shape or out.dtype != keys.dtype:
        raise ValueError(
            f"rotate: expected out like keys ({keys.dtype} {tuple(keys.shape)}), got {out.dtype} "
            f"{tuple(out.shape)}"
        )
    _rotate(keys, cos, sin, interleaved=interleaved, start=start, out=out)
    return out
