"""Appending and attention over :class:`StaticBlocks` as torch operators, so that compilers and CUDA
graphs see two opaque calls a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from .packed_append import Sizes, StaticBlocks, packed_append
from .packed_attention import packed_attention


def _blocks(memory: torch.Tensor, sizes: Sequence[int]) -> StaticBlocks:
    return StaticBlocks(memory, cast(Sizes, tuple(sizes)))


@torch.library.custom_op("hf_kvcodecs::static_append", mutates_args=("memory",))
def static_append(
    keys: torch.Tensor,
    values: torch.Tensor,
    memory: torch.Tensor,
    sizes: Sequence[int],
    max_tokens: int,
) -> torch.Tensor:
    """:func:`packed_append`; ``memory`` and ``sizes`` are those of :class:`StaticBlocks`."""
    return packed_append(keys, values, _blocks(memory, sizes), max_tokens)


@static_append.register_fake
def _(keys: torch.Tensor, *_: Any) -> torch.Tensor:
    return keys.new_empty((2, keys.shape[0]), dtype=torch.int32)


@torch.library.custom_op("hf_kvcodecs::static_attention", mutates_args=())
def static_attention(
    query: torch.Tensor,
    after: torch.Tensor,
    span: torch.Tensor | None,
    memory: torch.Tensor,
    sizes: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """:func:`packed_attention` after the append that returned ``after``; NaN once that lost tokens.

    ``span``: int32 ``[2, batch]``, each row's first visible token and its length; a row gets NaN
    where the first is negative or the second is not what ``after`` says. All tokens if None.
    """
    held = _blocks(memory, sizes)
    blocks = held.blocks()
    keys, values = held.ring
    return packed_attention(
        query,
        blocks,
        keys,
        values,
        scale=scale,
        sealed=after[1],
        lengths=after[0],
        starts=None if span is None else span[0],
        ends=None if span is None else span[1],
        sealed_visible=True,  # at least as many tokens stay dense as are queried
        ring=True,
        lost=blocks.cursors[2:],
    )


@static_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, tokens, head_dim = query.shape
    return query.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)
