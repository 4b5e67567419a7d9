"""Unpacking in plain torch: the format of :mod:`hf_kvcodecs.layouts` read line by line."""

from __future__ import annotations

import functools

import torch

from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks


def exponent_unpack_reference(
    packed: PackedBlocks, layout: ExponentLayout, out: torch.Tensor
) -> None:
    """See :func:`hf_kvcodecs.kernels.exponent_unpack.exponent_unpack`; ``head_dim`` is even
    here."""
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
    bits: torch.Tensor = ((words.to(torch.int32).unsqueeze(-2) >> shifts) & 1).flatten(-3, -2)
    return bits


def expand_escapes(packed: PackedBlocks, layout: ExponentLayout) -> torch.Tensor:
    """Optional planes of every unit ``[batch, kv_heads, blocks, T/U, D, planes]``, all ones where
    none is stored."""
    tags, channels = packed.planes["tags"], packed.planes["base"].shape[-1]
    table = _tag_table(layout.tag_bits, layout.optional_planes, tags.device)
    stored = table.index_select(0, tags.flatten().to(torch.int32)).view(torch.bool)
    stored = stored.view(*tags.shape[:-1], -1, layout.optional_planes)[..., :channels, :]
    words = torch.full_like(
        stored, -1 if layout.escape_dtype == torch.int16 else 0xFF, dtype=layout.escape_dtype
    )
    if (
        words.device.type == "cpu"
    ):  # twice as fast there; elsewhere indexing by a mask waits for the device
        words.view(-1)[stored.flatten()] = packed.pools["escapes"]
        return words
    words.masked_scatter_(stored, packed.pools["escapes"])
    return words


@functools.cache
def _tag_table(tag_bits: int, planes: int, device: torch.device) -> torch.Tensor:
    """For each tag byte its ``8 / tag_bits`` units' ``planes`` flags "is stored", as bytes read at
    once.

    Eight flags a byte are one int64, so that a single look-up spreads them; otherwise they stay
    uint8 rows.
    """
    with torch.inference_mode(False):
        byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)
        tag = (byte >> torch.arange(0, 8, tag_bits, dtype=torch.uint8, device=device)) & (
            2**tag_bits - 1
        )
        flags = tag.unsqueeze(-1) > torch.arange(planes, dtype=torch.uint8, device=device)
        rows: torch.Tensor = flags.view(torch.uint8).flatten(1)
        return rows.view(torch.int64).squeeze(-1) if rows.shape[1] == 8 else rows
