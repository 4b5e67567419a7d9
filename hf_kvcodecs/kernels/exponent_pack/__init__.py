"""Dense floating-point blocks to packed ones."""

from __future__ import annotations

import torch

from ...errors import UnsupportedLayoutError
from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks
from ..dispatch import on_device, triton_missing
from ..register_blocks import BLOCK_TOKENS, RegisterBlocks
from .reference import exponent_pack_reference

CHUNK_ELEMENTS = (
    1 << 19
)  # temporaries take about 40 bytes an element: 20 MB at a time, which also stays near the caches

__all__ = ["exponent_pack", "register_pack"]


def exponent_pack(words: torch.Tensor, layout: ExponentLayout) -> PackedBlocks:
    """Blocks packed without loss in the format that :mod:`hf_kvcodecs.layouts` writes down.

    Args:
        words: ``[batch, kv_heads, blocks, tokens, head_dim]``, the numbers' bit patterns as int16
            (uint8 for fp8), any strides, any device; ``tokens`` a multiple of 16. Not changed.
        layout: the code of that floating-point format.

    Returns:
        Records ``[batch, kv_heads, blocks]`` on the same device, sharing no memory with ``words``.

    Raises:
        ValueError: another dtype or shape.
    """
    dtype = torch.int16 if layout.word_bits == 16 else torch.uint8
    if words.dtype != dtype or words.dim() != 5 or words.shape[3] % WORD_TOKENS:
        raise ValueError(
            f"words: expected {dtype} [batch, kv_heads, blocks, tokens, head_dim] with tokens a "
            "multiple of "
            f"{WORD_TOKENS}, got {words.dtype} {tuple(words.shape)}"
        )
    if words.shape[-1] % 2:
        words = torch.nn.functional.pad(words, (0, 1))
    blocks = words.shape[2]
    step = max(CHUNK_ELEMENTS * max(blocks, 1) // max(words.numel(), 1), 1)
    if blocks <= step:
        return exponent_pack_reference(words, layout)
    return PackedBlocks.cat(
        [exponent_pack_reference(words[:, :, i : i + step], layout) for i in range(0, blocks, step)]
    )


def register_pack(keys: torch.Tensor, values: torch.Tensor, blocks: RegisterBlocks) -> None:
    """Seals full blocks behind those that ``blocks`` holds, on the GPU, without waiting for it.

    Args:
        keys, values: bf16 ``[batch, kv_heads, tokens, head_dim]``, ``tokens`` a multiple of 128,
            any strides with head_dim contiguous. Not changed.
        blocks: written in place; see :mod:`hf_kvcodecs.kernels.register_blocks`. What finds no room
            is counted there: :meth:`RegisterBlocks.check` raises then.

    Raises:
        UnsupportedLayoutError: no Triton, or no GPU that it runs on.
        ValueError: other shapes or dtypes, or more blocks than ``blocks.table`` has places for.
    """
    missing = triton_missing(keys.device)
    if missing:
        raise UnsupportedLayoutError(f"register_pack cannot take {missing}.")
    batch, kv_heads, capacity = blocks.table.shape
    expected = (batch, kv_heads, keys.shape[2], blocks.head_dim)
    for name, states in (("keys", keys), ("values", values)):
        if states.dtype != torch.bfloat16 or tuple(states.shape) != expected:
            raise ValueError(
                f"{name}: expected bfloat16 {expected}, got {states.dtype} {tuple(states.shape)}"
            )
        if states.device != blocks.table.device:
            raise ValueError(f"{name}: on {states.device}, the blocks on {blocks.table.device}")
    for name in ("words", "pool", "raw", "table", "raw_list", "raw_count"):
        if not getattr(blocks, name).is_contiguous():
            raise ValueError(f"blocks.{name}: expected contiguous memory, got other strides")
    count, rest = divmod(keys.shape[2], BLOCK_TOKENS)
    if rest or blocks.blocks + count > capacity:
        raise ValueError(
            f"keys: {keys.shape[2]} tokens; expected a multiple of {BLOCK_TOKENS}, and at most "
            f"{capacity - blocks.blocks} blocks, which is the room left"
        )
    if count == 0 or batch == 0:
        blocks.blocks += count
        return
    from .kernel import _pack_kernel

    bases = torch.empty(
        (batch * kv_heads * count, 2 * blocks.head_dim), dtype=torch.uint8, device=keys.device
    )
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    with on_device(keys.device):
        _pack_kernel[(batch * kv_heads, count)](
            keys.view(torch.int16), values.view(torch.int16), blocks.words, blocks.pool, blocks.raw,
            blocks.table, blocks.raw_list, blocks.raw_count, blocks.cursors,
            blocks.raw_list if blocks.raw_free is None else blocks.raw_free, bases, blocks.blocks,
            capacity, blocks.pool.numel(), blocks.raw_room, kv_heads,
            *keys.stride()[:3], *values.stride()[:3],
            HEAD_DIM=blocks.head_dim,
            D=max(1 << (blocks.head_dim - 1).bit_length(), 64), SLOT=blocks.words.shape[1],
            PACKED=blocks.packable, OWN_POOL=blocks.own_pool_words, num_warps=16,
        )  # fmt: skip
    blocks.blocks += count
