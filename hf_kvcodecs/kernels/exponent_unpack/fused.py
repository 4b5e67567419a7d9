"""Unpacking 16-bit formats in one pass over 32-bit lanes: two neighbouring channels are decoded at
a time.

The same arithmetic as the reference, on int32 words that hold two 16-bit halves, one channel in
each. int32 is what Inductor's C++ backend vectorises (int16 is not), and no half ever carries into
the other: codes and bases are 8-bit numbers in 16-bit fields.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks
from .reference import expand_escapes

BOTH = 0x0001_0001  # times a 16-bit constant: that constant in both halves


class FusedInputs(NamedTuple):
    """The arguments of :func:`unpack_pairs`: rows are ``batch * kv_heads``, channels go in pairs.

    Attributes:
        base: int32 ``[rows, blocks, D/2]``, base minus 15 modulo 256 in each half.
        low: int32 ``[rows, blocks, T/2, D/2]``.
        bits: int32 ``[rows, blocks, T/16, planes, D/2]``.
        optional: int32 ``[rows, blocks, T/16, D/2]``, code bit 3.
        lower: None, or int32 ``[rows, blocks, T/16, 16, D/2]``: the lower halves of float32.
        tail: ``[rows, tail_tokens, D/2]``: int32, or int64 with ``lower``.
    """

    base: torch.Tensor
    low: torch.Tensor
    bits: torch.Tensor
    optional: torch.Tensor
    lower: torch.Tensor | None
    tail: torch.Tensor
    mantissa_bits: int
    exponent_bits: int


def fused_inputs(
    packed: PackedBlocks, layout: ExponentLayout, tail: torch.Tensor, lower: torch.Tensor | None
) -> FusedInputs:
    """Views of the packed arrays as 32-bit lanes; see ``exponent_unpack`` for the arguments."""

    def pairs(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.int32).flatten(0, 1)

    wide = torch.int32 if lower is None else torch.int64
    inputs = FusedInputs(
        base=pairs((packed.planes["base"].to(torch.int16) - (2**layout.window_bits - 1)) & 0xFF),
        low=pairs(packed.planes["low"]),
        bits=pairs(packed.planes["bits"]),
        optional=pairs(expand_escapes(packed, layout)[..., 0]),
        lower=None if lower is None else pairs(lower).unflatten(2, (-1, WORD_TOKENS)),
        tail=tail.contiguous().view(wide).flatten(0, 1),
        mantissa_bits=layout.mantissa_bits,
        exponent_bits=layout.exponent_bits,
    )
    for tensor in inputs[:5]:  # block count and rows vary in one compiled function
        if isinstance(tensor, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    torch._dynamo.maybe_mark_dynamic(inputs.tail, 0)
    if inputs.tail.shape[1]:  # unbacked: a tail of one token needs no variant of its own
        torch._dynamo.decorators.mark_unbacked(inputs.tail, 1)
    return inputs


def unpack_pairs(
    base: torch.Tensor,
    low: torch.Tensor,
    bits: torch.Tensor,
    optional: torch.Tensor,
    lower: torch.Tensor | None,
    tail: torch.Tensor,
    mantissa_bits: int,
    exponent_bits: int,
) -> torch.Tensor:
    """All tokens, the tail's last: ``[rows, blocks * T + tail_tokens, D/2]`` in the tail's dtype.

    The arguments are those of :class:`FusedInputs`. The tail goes through here so that the compiled
    function writes straight into the one result: given a strided output, Inductor would compute
    into a second buffer as large and copy it.
    """
    code_shift = mantissa_bits  # the three low code bits sit above the mantissa
    token = torch.arange(WORD_TOKENS, dtype=torch.int32, device=low.device).unsqueeze(-1)
    byte = torch.arange(0, 16, 8, dtype=torch.int32, device=low.device).unsqueeze(-1)
    fixed = (low.unflatten(2, (-1, 8)).unsqueeze(-2) >> byte) & (0xFF * BOTH)
    fixed = fixed.flatten(3, 4)  # [rows, blocks, T/16, 16, D/2]
    for plane in range(bits.shape[3]):
        fixed = fixed | (((bits[:, :, :, plane].unsqueeze(-2) >> token) & BOTH) << (8 + plane))
    code = (fixed >> code_shift) & (0b111 * BOTH)
    code = code | (((optional.unsqueeze(-2) >> token) & BOTH) << 3)
    nonzero = ((code + 15 * BOTH) >> 4) & BOTH  # 1 where the 4-bit code is not 0
    exponent = (code + base[:, :, None, None]) & ((2**exponent_bits - 1) * BOTH) & (nonzero * 0xFF)
    sign = (fixed >> (code_shift + 3)) & BOTH
    mantissa = fixed & ((2**mantissa_bits - 1) * BOTH)
    words = (sign << 15) | (exponent << mantissa_bits) | mantissa
    if lower is not None:
        words = _join_halves(words, lower)
    return torch.cat([words.flatten(1, 3), tail], dim=1)


def _join_halves(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Pairs of upper and of lower 16-bit halves to pairs of 32-bit words, in int64."""
    upper, lower = upper.to(torch.int64), lower.to(torch.int64)
    first = ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)
    second = (upper & 0xFFFF0000) | ((lower >> 16) & 0xFFFF)
    return first | (second << 32)
