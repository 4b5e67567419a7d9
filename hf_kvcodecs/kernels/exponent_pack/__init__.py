"""Dense floating-point blocks to packed ones."""

from __future__ import annotations

import torch

from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks
from .reference import exponent_pack_reference

CHUNK_ELEMENTS = (
    1 << 19
)  # temporaries take about 40 bytes an element: 20 MB at a time, which also stays near the caches

__all__ = ["exponent_pack"]


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
