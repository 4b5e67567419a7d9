"""Keys and values of fixed capacity whose lengths only the device knows: for captured graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UnsupportedLayoutError
from ..dispatch import on_device, triton_missing
from ..register_blocks import BLOCK_TOKENS, RegisterBlocks, slot_words

RING_TOKENS = 2 * BLOCK_TOKENS
KEEP_TOKENS = 64  # dense tokens that stay behind a block when it is sealed
MAX_NEW_TOKENS = 64

__all__ = ["KEEP_TOKENS", "MAX_NEW_TOKENS", "RING_TOKENS", "Sizes", "StaticBlocks", "packed_append"]


Sizes = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class StaticBlocks:
    """All memory of one layer in one tensor, which never moves: compilers and graphs have to watch
    over a single one.

    Attributes:
        memory: int32 ``[n]``, the parts below one behind the other.
        sizes: batch, kv_heads, head_dim, blocks of a row, words of the pool, raw slots.
    """

    memory: torch.Tensor
    sizes: Sizes

    @staticmethod
    def allocate(
        like: torch.Tensor, blocks: int, *, pool_words: int, raw_slots: int
    ) -> StaticBlocks:
        """Empty memory for ``blocks`` blocks a row of states like ``like`` ``[batch, kv_heads, _,
        head_dim]``."""
        batch, kv_heads, _, head_dim = like.shape
        sizes = batch, kv_heads, head_dim, blocks, pool_words, raw_slots
        words = sum(_parts(sizes))
        return StaticBlocks(torch.zeros(words, dtype=torch.int32, device=like.device), sizes)

    def _split(self) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = self.memory.split(_parts(self.sizes))
        return parts

    @property
    def rows(self) -> int:
        return self.sizes[0] * self.sizes[1]

    @property
    def ring(self) -> torch.Tensor:
        """bf16 ``[2, batch, kv_heads, 256, head_dim]``: keys and values of the tokens behind the
        sealed blocks, token ``t`` at ``t % 256``."""
        batch, kv_heads, head_dim, *_ = self.sizes
        ring = self._split()[3].view(torch.bfloat16)
        return ring.view(2, batch, kv_heads, RING_TOKENS, head_dim)

    @property
    def state(self) -> torch.Tensor:
        """int32 ``[2, rows]``: each row's tokens and sealed blocks."""
        return self._split()[4].view(2, self.rows)

    @property
    def tables(self) -> torch.Tensor:
        """int32: ``state``, and all tables of :meth:`blocks`."""
        return self.memory[sum(_parts(self.sizes)[:4]) :]

    def blocks(self, sealed: int = 0) -> RegisterBlocks:
        """The memory as :class:`RegisterBlocks`, ``sealed`` blocks of each row in use."""
        batch, kv_heads, head_dim, capacity, _, raw_slots = self.sizes
        words, pool, raw, _, _, count, table, raw_list, cursors = self._split()
        return RegisterBlocks(
            head_dim=head_dim,
            words=words.view(-1, slot_words(head_dim)),
            pool=pool,
            raw=raw.view(torch.int16).view(raw_slots, 2, BLOCK_TOKENS, head_dim),
            table=table.view(batch, kv_heads, capacity),
            raw_list=raw_list.view(batch, kv_heads, capacity),
            raw_count=count.view(batch, kv_heads),
            cursors=cursors[:3],
            blocks=sealed,
        )


def _parts(sizes: Sizes) -> list[int]:
    """Words of each part: packed words, pool, raw blocks, ring, state, the tables. Those that
    kernels read 16 bytes at a time come first; their sizes are multiples of that."""
    batch, kv_heads, head_dim, blocks, pool_words, raw_slots = sizes
    rows = batch * kv_heads
    return [
        rows * blocks * slot_words(head_dim),
        -(-pool_words // 4) * 4,
        raw_slots * BLOCK_TOKENS * head_dim,
        rows * RING_TOKENS * head_dim,
        2 * rows,
        rows,
        rows * blocks,
        rows * blocks,
        4,
    ]


def packed_append(
    keys: torch.Tensor, values: torch.Tensor, memory: StaticBlocks, max_tokens: int
) -> torch.Tensor:
    """Adds tokens to every row, in place, and seals a block of each that has 192 dense ones.

    Does not wait for the device.

    Args:
        keys, values: bf16 ``[batch, kv_heads, tokens, head_dim]``, 1 to 64 tokens, any strides with
            head_dim contiguous. Not changed.
        memory: written in place.
        max_tokens: tokens that a row may hold. Beyond them nothing is written and ``cursors[2]``,
            the count of what was lost, rises.

    Returns:
        int32 ``[2, batch]``: each row's tokens and sealed blocks after it.

    Raises:
        UnsupportedLayoutError: no Triton, or no GPU that it runs on.
        ValueError: other shapes or dtypes.
    """
    missing = triton_missing(keys.device)
    if missing:
        raise UnsupportedLayoutError(f"packed_append cannot take {missing}.")
    batch, kv_heads, head_dim, capacity, *_ = memory.sizes
    expected = (batch, kv_heads, keys.shape[2], head_dim)
    for name, states in (("keys", keys), ("values", values)):
        if states.dtype != torch.bfloat16 or tuple(states.shape) != expected:
            raise ValueError(
                f"{name}: expected bfloat16 {expected}, got {states.dtype} {tuple(states.shape)}"
            )
    new = keys.shape[2]
    if not 1 <= new <= MAX_NEW_TOKENS:
        raise ValueError(f"keys: expected 1 to {MAX_NEW_TOKENS} tokens, got {new}")
    from .kernel import _append_kernel

    blocks, rows = memory.blocks(), memory.rows
    after = memory.memory.new_empty((2, batch))
    bases = torch.empty((rows, 2 * head_dim), dtype=torch.uint8, device=keys.device)
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    with on_device(keys.device):
        _append_kernel[(rows,)](
            keys.view(torch.int16), values.view(torch.int16), memory.ring.view(torch.int16),
            memory.state, after, blocks.words, blocks.pool, blocks.raw, blocks.table,
            blocks.raw_list, blocks.raw_count, blocks.cursors, bases,
            new, max_tokens, capacity, blocks.pool.numel(), blocks.raw.shape[0], kv_heads,
            *keys.stride()[:3], *values.stride()[:3],
            T=1 << (new - 1).bit_length(), RING=RING_TOKENS, SEAL_AT=BLOCK_TOKENS + KEEP_TOKENS,
            HEAD_DIM=head_dim, D=head_dim, SLOT=blocks.words.shape[1], num_warps=16,
        )  # fmt: skip
    return after
