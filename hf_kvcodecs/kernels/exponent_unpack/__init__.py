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
) -> None:
    """Writes the first ``blocks * block_tokens`` tokens of ``out``: exactly the words that were
    packed.

    Args:
        packed: blocks in the format that :mod:`hf_kvcodecs.layouts` writes down, on the device of
            ``out``.
        layout: the code of that floating-point format.
        out: ``[batch, kv_heads, tokens, head_dim]``, contiguous, int16 (uint8 for fp8), with room
            for the blocks. Changed in place; tokens behind the blocks are left as they are.
        block_tokens: tokens of one block.
        backend: "auto" | "torch" | "compile", see :mod:`hf_kvcodecs.kernels.dispatch`.

    Raises:
        ValueError: ``out`` has another dtype, another shape, or strides.
    """
    blocks, batch, heads = packed.lead_shape
    dtype = torch.int16 if layout.word_bits == 16 else torch.uint8
    fits = (
        out.dim() == 4 and out.shape[:2] == (batch, heads) and out.shape[2] >= blocks * block_tokens
    )
    if out.dtype != dtype or not fits or not out.is_contiguous():
        raise ValueError(
            f"out: expected contiguous {dtype} [{batch}, {heads}, >= {blocks * block_tokens}, "
            "head_dim], "
            f"got {out.dtype} {tuple(out.shape)} with strides {out.stride()}"
        )
    if blocks == 0 or out.numel() == 0:
        return
    if out.shape[-1] % 2:
        wide = out.new_empty((*out.shape[:-1], out.shape[-1] + 1))
        exponent_unpack(packed, layout, wide, block_tokens, backend)
        out[:, :, : blocks * block_tokens] = wide[:, :, : blocks * block_tokens, :-1]
        return
    if layout.word_bits == 16:
        inputs = fused_inputs(packed, layout, out, block_tokens)
        if use_compiled(backend, out.device, out.numel()):
            compiled_or_eager(unpack_pairs, *inputs)
        else:
            unpack_pairs(*inputs)
    else:
        exponent_unpack_reference(packed, layout, block_view(out, blocks, block_tokens))
    apply_patches(packed, out, block_tokens)


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
    out.view(-1)[index] = packed.pools["patch_bits"]
