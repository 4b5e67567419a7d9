"""The rotation in plain torch, on every device."""

from __future__ import annotations

import torch


def angles_between(
    old: torch.Tensor, new: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 ``[tokens, pairs]`` of the rotation from ``old`` to ``new`` positions.

    A model rotates by ``float32(position * inv_freq)``. The difference of these very angles is
    taken in float64: at position 50,000 a float32 angle is off by 0.002, and so is the model's.

    Args:
        old: int64 ``[tokens]``.
        new: int64 ``[tokens]``.
        inv_freq: float32 ``[pairs]``.
    """
    frequencies = inv_freq.float()
    before = (old.float()[:, None] * frequencies).double()
    after = (new.float()[:, None] * frequencies).double()
    difference = after - before
    return difference.cos().float(), difference.sin().float()


def rotate(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    start: int,
    out: torch.Tensor,
) -> None:
    """See :func:`hf_kvcodecs.kernels.rotate.rotate`."""
    stop = start + 2 * cos.shape[-1]
    if interleaved:
        first, second = slice(start, stop, 2), slice(start + 1, stop, 2)
    else:
        middle = start + cos.shape[-1]
        first, second = slice(start, middle), slice(middle, stop)
    x, y = keys[..., first].float(), keys[..., second].float()
    if out.dtype == torch.float32:  # nothing to round: no memory between
        torch.mul(x, cos, out=out[..., first]).addcmul_(y, sin, value=-1)
        torch.mul(y, cos, out=out[..., second]).addcmul_(x, sin)
    else:
        out[..., first] = torch.addcmul(x * cos, y, sin, value=-1)
        out[..., second] = torch.addcmul(y * cos, x, sin)
    if 2 * cos.shape[-1] < keys.shape[-1]:
        out[..., :start], out[..., stop:] = keys[..., :start], keys[..., stop:]
