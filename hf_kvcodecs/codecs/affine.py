"""Asymmetric int8 and int4 with one scale per slice of an axis (KIVI's two layouts): lossy.

For each slice along ``axis`` the codes ``q`` of ``bits`` bits mean ``low + q * scale`` with
``low`` its minimum and ``scale = (maximum - minimum) / (2**bits - 1)``, both float32. Keys are
coded per channel (``axis`` = tokens: outliers keep to their channels), values per token (``axis`` =
head_dim). int4 packs two neighbours of the last axis into a byte, the first one low; an odd last
axis gets one zero more.

Follows KIVI (arXiv 2402.02750); without its dense window of recent tokens, which a cache at rest
has no need of.
"""

from __future__ import annotations

import torch

from ..errors import CorruptDataError

BITS = (8, 4)


def affine_encode(states: torch.Tensor, bits: int, axis: int) -> dict[str, torch.Tensor]:
    """``states`` (floating point, any shape) as ``codes`` uint8, ``low`` and ``scale`` float32.

    Args:
        states: finite numbers.
        bits: 8 or 4.
        axis: the axis that shares a scale; it has length 1 in ``low`` and ``scale``.
    """
    if bits not in BITS:
        raise ValueError(f"bits: expected one of {BITS}, got {bits!r}")
    wide = states.float()
    low, high = wide.amin(axis, keepdim=True), wide.amax(axis, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    # A constant slice has scale 0: every code is then 0 and decodes to `low`.
    codes = ((wide - low) / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()
    codes = codes.clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return {"codes": codes.contiguous(), "low": low.contiguous(), "scale": scale.contiguous()}


def affine_decode(
    packed: dict[str, torch.Tensor], bits: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers that :func:`affine_encode` coded, rounded; ``width`` is their last axis."""
    codes, low, scale = packed["codes"], packed["low"], packed["scale"]
    if codes.dtype != torch.uint8 or low.shape != scale.shape:
        raise CorruptDataError("affine codes: expected uint8 codes, and a scale for every minimum")
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., :width]
    if codes.shape[-1] != width:
        raise CorruptDataError(f"affine codes: {codes.shape[-1]} numbers a row, expected {width}")
    return torch.addcmul(low, codes.float(), scale).to(dtype)
