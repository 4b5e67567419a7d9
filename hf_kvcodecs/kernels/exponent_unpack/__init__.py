"""Packed blocks to dense floating-point ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import UnsupportedLayoutError
from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks
from ..dispatch import compiled_or_eager, launch_options, on_device, triton_missing, use_compiled
from ..register_blocks import BLOCK_TOKENS, RegisterBlocks
from .fused import fused_inputs, unpack_pairs
from .reference import exponent_unpack_reference

__all__ = ["exponent_unpack", "register_unpack"]


def exponent_unpack(
    packed: PackedBlocks,
    layout: ExponentLayout,
    tail: torch.Tensor,
    backend: str = "auto",
    lower: torch.Tensor | None = None,
) -> torch.Tensor:
    """The very words once packed, with the dense words of ``tail`` behind them, in one new tensor.

    Args:
        packed: blocks in the format that :mod:`hf_kvcodecs.layouts` writes down.
        layout: the code of that floating-point format.
        tail: ``[batch, kv_heads, tail_tokens, head_dim]``, int16 (uint8 for fp8, int32 with
            ``lower``), any strides, on the device of ``packed``.
        backend: "auto" | "torch" | "compile", see :mod:`hf_kvcodecs.kernels.dispatch`.
        lower: int16 ``[batch, kv_heads, blocks, block_tokens, head_dim]``, for 16-bit formats: the
            lower halves of 32-bit words whose upper halves are packed.

    Returns:
        ``[batch, kv_heads, blocks * block_tokens + tail_tokens, head_dim]``, contiguous, in the
        dtype of ``tail``.

    Raises:
        ValueError: ``tail`` has another dtype or shape.
    """
    batch, heads, blocks = packed.lead_shape
    dtype = torch.uint8 if layout.word_bits == 8 else torch.int16 if lower is None else torch.int32
    if tail.dtype != dtype or tail.dim() != 4 or tail.shape[:2] != (batch, heads):
        raise ValueError(
            f"tail: expected {dtype} [{batch}, {heads}, tokens, head_dim], got {tail.dtype} "
            f"{tuple(tail.shape)}"
        )
    if 0 in packed.lead_shape:
        tokens = blocks * packed.planes["bits"].shape[3] * WORD_TOKENS
        return torch.cat([tail.new_empty((batch, heads, tokens, tail.shape[3])), tail], dim=2)
    if tail.shape[-1] % 2:
        pad = torch.nn.functional.pad
        lower = None if lower is None else pad(lower, (0, 1))
        wide = exponent_unpack(packed, layout, pad(tail, (0, 1)), backend, lower)
        return wide[..., :-1].contiguous()
    tokens = packed.planes["bits"].shape[3] * WORD_TOKENS
    if layout.word_bits == 16:
        out = _unpack_fused(packed, layout, tail, backend, lower)
        apply_patches(packed, out, tokens)
        return out
    out = tail.new_empty((batch, heads, blocks * tokens + tail.shape[2], tail.shape[3]))
    exponent_unpack_reference(packed, layout, block_view(out, blocks, tokens))
    out[:, :, blocks * tokens :] = tail
    return out


def _unpack_fused(
    packed: PackedBlocks,
    layout: ExponentLayout,
    tail: torch.Tensor,
    backend: str,
    lower: torch.Tensor | None,
) -> torch.Tensor:
    inputs = fused_inputs(packed, layout, tail, lower)
    if use_compiled(backend, tail.device, inputs.low.numel() * 4):
        words = compiled_or_eager(unpack_pairs, *inputs)
    else:
        words = unpack_pairs(*inputs)
    return words.view(tail.dtype).view(*tail.shape[:2], -1, tail.shape[3])


def block_view(out: torch.Tensor, blocks: int, block_tokens: int) -> torch.Tensor:
    """``out`` ``[batch, heads, tokens, D]`` as ``[batch, heads, blocks, block_tokens, D]``."""
    view: torch.Tensor = out[:, :, : blocks * block_tokens].unflatten(2, (blocks, block_tokens))
    return view


def apply_patches(packed: PackedBlocks, out: torch.Tensor, block_tokens: int) -> None:
    """Writes the misfits' own bits over what the code says."""
    if "patch_index" not in packed.pools or packed.pools["patch_index"].numel() == 0:
        return
    batch, heads, blocks = packed.lead_shape
    row_words, block_words = out.shape[2] * out.shape[3], block_tokens * out.shape[3]
    rows = torch.arange(0, batch * heads * row_words, row_words, device=out.device)
    within = torch.arange(0, blocks * block_words, block_words, device=out.device)
    start = (rows.unsqueeze(1) + within).flatten()  # where each record begins in `out`, flattened
    index = packed.pools["patch_index"] + torch.repeat_interleave(
        start, packed.counts["patches"].flatten()
    )
    bits = packed.pools["patch_bits"]
    if out.dtype == torch.int32:  # upper halves: what is below stays
        bits = (bits.to(torch.int32) << 16) | (out.view(-1)[index] & 0xFFFF)
    out.view(-1)[index] = bits


def register_unpack(
    blocks: RegisterBlocks,
    start: int = 0,
    stop: int | None = None,
    *,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The very keys and values that were sealed, bit for bit, without waiting for the GPU.

    Args:
        blocks: sealed by :func:`hf_kvcodecs.kernels.exponent_pack.register_pack`.
        start, stop: the range of blocks; all if left out.
        into: where to write keys and values, head_dim contiguous; new tensors if None.

    Returns:
        keys and values, bf16 ``[batch, kv_heads, (stop - start) * 128, head_dim]``.

    Raises:
        UnsupportedLayoutError: no Triton, or no GPU that it runs on.
        ValueError: a range that is not sealed, or another ``into``.
    """
    device = blocks.table.device
    missing = triton_missing(device)
    if missing:
        raise UnsupportedLayoutError(f"register_unpack cannot take {missing}.")
    stop = blocks.blocks if stop is None else stop
    if not 0 <= start <= stop <= blocks.blocks:
        raise ValueError(f"blocks {start} to {stop}: expected a range within 0 to {blocks.blocks}")
    batch, kv_heads, capacity = blocks.table.shape
    shape = (batch, kv_heads, (stop - start) * BLOCK_TOKENS, blocks.head_dim)
    if into is None:
        into = torch.empty((2, *shape), dtype=torch.bfloat16, device=device).unbind()
    for states in into:
        if (states.shape, states.dtype, states.device) != (shape, torch.bfloat16, device):
            raise ValueError(
                f"into: expected bfloat16 {shape} on {device}, got {states.dtype} "
                f"{tuple(states.shape)} on {states.device}"
            )
    keys, values = (states.view(torch.int16) for states in into)
    if stop > start and batch > 0:
        from .kernel import _unpack_kernel

        with on_device(device):
            _unpack_kernel[(batch * kv_heads, stop - start)](
                blocks.words, blocks.pool, blocks.raw, blocks.table, keys, values, start, capacity,
                kv_heads,                *keys.stride()[:3], *values.stride()[:3],
                HEAD_DIM=blocks.head_dim,
                D=max(1 << (blocks.head_dim - 1).bit_length(), 64), SLOT=blocks.words.shape[1],
                PACKED=blocks.packable, PTX=launch_options(device)["PTX"], num_warps=4,
            )  # fmt: skip
    return into[0], into[1]
