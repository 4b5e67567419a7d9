"""Packed blocks to dense floating-point ones."""

from __future__ import annotations

import torch

from ...layouts import ExponentLayout, PackedBlocks
from ..dispatch import compiled_or_eager, use_compiled
from .fused import fused_inputs, unpack_pairs
from .reference import exponent_unpack_reference

__all__ = ["exponent_unpack"]


def exponent_unpack(
    packed: PackedBlocks,
    layout: ExponentLayout,
    out: torch.Tensor,
    block_tokens: int,
    backend: str = "auto",
    lower: torch.Tensor | None = None,
) -> None:
    """Writes the first ``blocks * block_tokens`` tokens of ``out``: the very words once packed.

    Args:
        packed: blocks in the format that :mod:`hf_kvcodecs.layouts` writes down, on the device of
            ``out``.
        layout: the code of that floating-point format.
        out: ``[batch, kv_heads, tokens, head_dim]``, contiguous, int16 (uint8 for fp8, int32 with
            ``lower``), with room for the blocks. Changed in place; tokens behind the blocks are
            left as they are.
        block_tokens: tokens of one block.
        backend: "auto" | "torch" | "compile", see :mod:`hf_kvcodecs.kernels.dispatch`.
        lower: int16 ``[blocks, batch, kv_heads, block_tokens, head_dim]``, for 16-bit formats: the
            lower halves of 32-bit words whose upper halves are packed.

    Raises:
        ValueError: ``out`` has another dtype, another shape, or strides.
    """
    blocks, batch, heads = packed.lead_shape
    dtype = torch.uint8 if layout.word_bits == 8 else torch.int16 if lower is None else torch.int32
    wanted = (batch, heads, blocks * block_tokens)
    fits = out.dim() == 4 and out.shape[:2] == wanted[:2] and out.shape[2] >= wanted[2]
    if out.dtype != dtype or not fits or not out.is_contiguous():
        raise ValueError(
            f"out: expected contiguous {dtype} [{batch}, {heads}, >= {wanted[2]}, head_dim], "
            f"got {out.dtype} {tuple(out.shape)} with strides {out.stride()}"
        )
    if blocks == 0 or out.numel() == 0:
        return
    if out.shape[-1] % 2:
        wide = out.new_empty((*wanted, out.shape[-1] + 1))
        lower = None if lower is None else torch.nn.functional.pad(lower, (0, 1))
        exponent_unpack(packed, layout, wide, block_tokens, backend, lower)
        out[:, :, : wanted[2]] = wide[..., :-1]
    elif layout.word_bits == 16:
        inputs = fused_inputs(packed, layout, out, block_tokens, lower)
        if use_compiled(backend, out.device, out.numel()):
            compiled_or_eager(unpack_pairs, *inputs)
        else:
            unpack_pairs(*inputs)
        apply_patches(packed, out, block_tokens)
    else:
        exponent_unpack_reference(packed, layout, block_view(out, blocks, block_tokens))


def block_view(out: torch.Tensor, blocks: int, block_tokens: int) -> torch.Tensor:
    """``out`` ``[batch, kv_heads, tokens, D]`` seen as ``[blocks, batch, kv_heads, block_tokens,
    D]``."""
    split: torch.Tensor = out[:, :, : blocks * block_tokens].unflatten(2, (blocks, block_tokens))
    return split.permute(2, 0, 1, 3, 4)


def apply_patches(packed: PackedBlocks, out: torch.Tensor, block_tokens: int) -> None:
    """Writes the misfits' own bits over what the code says."""
    if "patch_index" not in packed.pools or packed.pools["patch_index"].numel() == 0:
        return
    blocks, batch, heads = packed.lead_shape
    _, _, tokens, channels = out.shape
    record = torch.arange(blocks * batch * heads, device=out.device).view(blocks, batch * heads)
    # Where each record begins in `out`, flattened: row (batch, head), then its block.
    start = (record % (batch * heads)) * (tokens * channels)
    start += torch.arange(blocks, device=out.device).unsqueeze(1) * (block_tokens * channels)
    index = packed.pools["patch_index"] + torch.repeat_interleave(
        start.flatten(), packed.counts["patches"].flatten()
    )
    bits = packed.pools["patch_bits"]
    if out.dtype == torch.int32:  # upper halves: what is below stays
        bits = (bits.to(torch.int32) << 16) | (out.view(-1)[index] & 0xFFFF)
    out.view(-1)[index] = bits
