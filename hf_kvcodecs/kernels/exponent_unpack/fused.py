"""Unpacking 16-bit formats in one pass over 32-bit lanes: two neighbouring channels are decoded at
a time.

The same arithmetic as the reference, on int32 words that hold two 16-bit halves, one channel in
each. int32 is what Inductor's C++ backend vectorises (int16 is not), and no half ever carries into
the other: codes and bases are 8-bit numbers in 16-bit fields.
"""

from __future__ import annotations

import torch

from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks
from .reference import expand_escapes

BOTH = 0x0001_0001  # times a 16-bit constant: that constant in both halves


def fused_inputs(
    packed: PackedBlocks, layout: ExponentLayout, out: torch.Tensor, block_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """The arguments of :func:`unpack_pairs`: rows are ``batch * kv_heads``, channels go in
    pairs."""
    blocks, groups = packed.lead_shape[0], block_tokens // WORD_TOKENS
    base = (packed.planes["base"].to(torch.int16) - (2**layout.window_bits - 1)) & 0xFF
    optional = expand_escapes(packed, layout)[..., 0]
    parts = [base, packed.planes["low"], packed.planes["bits"], optional]
    pairs = [part.contiguous().view(torch.int32).flatten(1, 2) for part in parts]
    rows = out.view(torch.int32).flatten(0, 1)[:, : blocks * block_tokens]
    pairs.append(rows.unflatten(1, (blocks, groups, WORD_TOKENS)).transpose(0, 1))
    for pair in pairs:  # block count and rows vary in one compiled function
        torch._dynamo.maybe_mark_dynamic(pair, 0)
        torch._dynamo.maybe_mark_dynamic(pair, 1)
    return (
        pairs[0],
        pairs[1],
        pairs[2],
        pairs[3],
        pairs[4],
        layout.mantissa_bits,
        layout.exponent_bits,
    )


def unpack_pairs(
    base: torch.Tensor,
    low: torch.Tensor,
    bits: torch.Tensor,
    optional: torch.Tensor,
    out: torch.Tensor,
    mantissa_bits: int,
    exponent_bits: int,
) -> None:
    """Decodes into ``out`` int32 ``[blocks, rows, T/16, 16, D/2]``, any strides.

    Args:
        base: int32 ``[blocks, rows, D/2]``, base minus 15 modulo 256 in each half.
        low: int32 ``[blocks, rows, T/2, D/2]``.
        bits: int32 ``[blocks, rows, T/16, planes, D/2]``.
        optional: int32 ``[blocks, rows, T/16, D/2]``, code bit 3.
    """
    code_shift = mantissa_bits  # the three low code bits sit above the mantissa
    token = torch.arange(WORD_TOKENS, dtype=torch.int32, device=out.device).unsqueeze(-1)
    byte = torch.arange(0, 16, 8, dtype=torch.int32, device=out.device).unsqueeze(-1)
    fixed = ((low.unflatten(2, (-1, 8)).unsqueeze(-2) >> byte) & (0xFF * BOTH)).flatten(
        3, 4
    )  # [.., T/16, 16, D/2]
    for plane in range(bits.shape[3]):
        fixed = fixed | (((bits[:, :, :, plane].unsqueeze(-2) >> token) & BOTH) << (8 + plane))
    code = (fixed >> code_shift) & (0b111 * BOTH)
    code = code | (((optional.unsqueeze(-2) >> token) & BOTH) << 3)
    nonzero = ((code + 15 * BOTH) >> 4) & BOTH  # 1 where the 4-bit code is not 0
    exponent = (code + base[:, :, None, None]) & ((2**exponent_bits - 1) * BOTH) & (nonzero * 0xFF)
    sign = (fixed >> (code_shift + 3)) & BOTH
    out.copy_(
        (sign << 15) | (exponent << mantissa_bits) | (fixed & ((2**mantissa_bits - 1) * BOTH))
    )
