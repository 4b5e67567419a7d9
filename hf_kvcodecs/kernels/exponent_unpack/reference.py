"""Unpacking in plain torch: the format of :mod:`hf_kvcodecs.layouts` read line by line."""

from __future__ import annotations

import torch

from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks


def exponent_unpack_reference(packed: PackedBlocks, layout: ExponentLayout, out: torch.Tensor) -> None:
    """See :func:`hf_kvcodecs.kernels.exponent_unpack.exponent_unpack`; ``head_dim`` is even here."""
    M, top_code = layout.mantissa_bits, 2**layout.window_bits - 1
    fixed = torch.zeros(out.shape, dtype=torch.int32, device=out.device)
    first_bit = 0
    if layout.has_low_bytes:
        low = packed.planes["low"].to(torch.int32)
        fixed |= torch.stack((low & 0xFF, (low >> 8) & 0xFF), dim=-2).flatten(-3, -2)
        first_bit = 8
    for p in range(layout.plane_count):
        fixed |= spread_bits(packed.planes["bits"][..., p, :], WORD_TOKENS) << (first_bit + p)

    code = (fixed >> M) & (2**layout.fixed_code_bits - 1)
    optional = expand_escapes(packed, layout)
    for p in range(layout.optional_planes):
        code |= spread_bits(optional[..., p], layout.unit_tokens) << (layout.fixed_code_bits + p)
    exponent = code + packed.planes["base"].to(torch.int32).unsqueeze(-2) - top_code
    if layout.reserve_zero:
        exponent = exponent.masked_fill(code == 0, 0)

    sign = fixed >> (M + layout.fixed_code_bits)
    words = (sign << (layout.word_bits - 1)) | (exponent << M) | (fixed & (2**M - 1))
    out.copy_(words.to(out.dtype))


def spread_bits(words: torch.Tensor, tokens: int) -> torch.Tensor:
    """Words ``[..., G, D]`` to their bits ``[..., G * tokens, D]`` as int32 zeros and ones."""
    shifts = torch.arange(tokens, dtype=torch.int32, device=words.device).unsqueeze(-1)
    return ((words.to(torch.int32).unsqueeze(-2) >> shifts) & 1).flatten(-3, -2)


def expand_escapes(packed: PackedBlocks, layout: ExponentLayout) -> torch.Tensor:
    """Optional planes of every unit ``[blocks, batch, kv_heads, T/U, D, planes]``, all ones where none is stored."""
    tags, channels = packed.planes["tags"], packed.planes["base"].shape[-1]
    if layout.tag_bits == 1:
        masks = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=tags.device)
        stored = (tags.unsqueeze(-1) & masks).to(torch.bool).flatten(-2)[..., :channels].unsqueeze(-1)
    else:
        shifts = torch.arange(0, 8, layout.tag_bits, dtype=torch.uint8, device=tags.device)
        tag = ((tags.unsqueeze(-1) >> shifts) & (2**layout.tag_bits - 1)).flatten(-2)[..., :channels].unsqueeze(-1)
        stored = tag > torch.arange(layout.optional_planes, dtype=torch.uint8, device=tags.device)
    words = torch.full_like(stored, -1 if layout.escape_dtype == torch.int16 else 0xFF, dtype=layout.escape_dtype)
    return words.masked_scatter_(stored, packed.pools["escapes"])
