"""Appending and attention over :class:`StaticBlocks` as torch operators, so that compilers and CUDA
graphs see two opaque calls a layer."""

from __future__ import annotations

import torch

from .packed_append import StaticBlocks, packed_append
from .packed_attention import packed_attention


@torch.library.custom_op(
    "hf_kvcodecs::static_append", mutates_args=("tables", "words", "pool", "raw", "ring")
)
def static_append(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    words: torch.Tensor,
    pool: torch.Tensor,
    raw: torch.Tensor,
    ring: torch.Tensor,
    max_tokens: int,
) -> torch.Tensor:
    """:func:`packed_append`; the tensors are those of :class:`StaticBlocks`."""
    return packed_append(keys, values, StaticBlocks(tables, words, pool, raw, ring), max_tokens)


@static_append.register_fake
def _(keys: torch.Tensor, *_: object) -> torch.Tensor:
    return keys.new_empty((2, keys.shape[0]), dtype=torch.int32)


@torch.library.custom_op("hf_kvcodecs::static_attention", mutates_args=())
def static_attention(
    query: torch.Tensor,
    after: torch.Tensor,
    starts: torch.Tensor | None,
    tables: torch.Tensor,
    words: torch.Tensor,
    pool: torch.Tensor,
    raw: torch.Tensor,
    ring: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """:func:`packed_attention` after the append that returned ``after``; NaN once that lost tokens,
    and in rows whose ``starts`` is negative."""
    blocks = StaticBlocks(tables, words, pool, raw, ring).blocks()
    keys, values = ring
    return packed_attention(
        query,
        blocks,
        keys,
        values,
        scale=scale,
        sealed=after[1],
        lengths=after[0],
        starts=starts,
        sealed_visible=True,  # at least as many tokens stay dense as are queried
        ring=True,
        lost=blocks.cursors[2:],
    )


@static_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, tokens, head_dim = query.shape
    return query.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)
