"""Keys and values of fixed capacity whose lengths only the device knows: for captured graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UnsupportedLayoutError
from ..dispatch import on_device, triton_missing
from ..register_blocks import BLOCK_TOKENS, RegisterBlocks

RING_TOKENS = 2 * BLOCK_TOKENS
KEEP_TOKENS = 64  # dense tokens that stay behind a block when it is sealed
MAX_NEW_TOKENS = 64

__all__ = ["KEEP_TOKENS", "MAX_NEW_TOKENS", "RING_TOKENS", "StaticBlocks", "packed_append"]


@dataclass(frozen=True, slots=True)
class StaticBlocks:
    """All memory of one layer, in tensors that never move and never change their size.

    Attributes:
        tables: int32, one after the other: ``state`` ``[2, rows]`` (the tokens and the sealed
            blocks of each row, ``rows = batch * kv_heads``), then ``raw_count`` ``[rows]``,
            ``table`` and ``raw_list`` ``[rows, blocks]`` and ``cursors`` ``[3]`` as
            :class:`RegisterBlocks` has them.
        words, pool, raw: as :class:`RegisterBlocks` has them.
        ring: bf16 ``[2, batch, kv_heads, 256, head_dim]``: keys and values of the tokens behind the
            sealed blocks, token ``t`` at ``t % 256``.
    """

    tables: torch.Tensor
    words: torch.Tensor
    pool: torch.Tensor
    raw: torch.Tensor
    ring: torch.Tensor

    @staticmethod
    def allocate(
        like: torch.Tensor, blocks: int, *, pool_words: int, raw_slots: int
    ) -> StaticBlocks:
        """Empty memory for ``blocks`` blocks a row of states like ``like`` ``[batch, kv_heads, _,
        head_dim]``."""
        batch, kv_heads, _, head_dim = like.shape
        memory = RegisterBlocks.allocate(
            batch, kv_heads, head_dim, blocks, like.device,
            pool_words=pool_words, raw_slots=raw_slots,
        )  # fmt: skip
        rows = batch * kv_heads
        return StaticBlocks(
            tables=memory.table.new_zeros(3 * rows + 2 * rows * blocks + 3),
            words=memory.words,
            pool=memory.pool,
            raw=memory.raw,
            ring=like.new_zeros((2, batch, kv_heads, RING_TOKENS, head_dim)),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tables, self.words, self.pool, self.raw, self.ring

    @property
    def rows(self) -> int:
        return self.ring.shape[1] * self.ring.shape[2]

    @property
    def capacity(self) -> int:
        """Blocks of a row."""
        return (self.tables.numel() - 3 - 3 * self.rows) // (2 * self.rows)

    @property
    def state(self) -> torch.Tensor:
        """int32 ``[2, rows]``: tokens, sealed blocks."""
        return self.tables[: 2 * self.rows].view(2, self.rows)

    def blocks(self, sealed: int = 0) -> RegisterBlocks:
        """The same memory as :class:`RegisterBlocks`, ``sealed`` blocks of each row in use."""
        _, batch, kv_heads, _, head_dim = self.ring.shape
        rows, capacity = self.rows, self.capacity
        count, table, raw_list, cursors = self.tables[2 * rows :].split(
            [rows, rows * capacity, rows * capacity, 3]
        )
        return RegisterBlocks(
            head_dim=head_dim,
            words=self.words,
            pool=self.pool,
            raw=self.raw,
            table=table.view(batch, kv_heads, capacity),
            raw_list=raw_list.view(batch, kv_heads, capacity),
            raw_count=count.view(batch, kv_heads),
            cursors=cursors,
            blocks=sealed,
        )


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
    _, batch, kv_heads, ring, head_dim = memory.ring.shape
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
    after = memory.tables.new_empty((2, batch))
    bases = torch.empty((rows, 2 * head_dim), dtype=torch.uint8, device=keys.device)
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    with on_device(keys.device):
        _append_kernel[(rows,)](
            keys.view(torch.int16), values.view(torch.int16), memory.ring.view(torch.int16),
            memory.state, after, blocks.words, blocks.pool, blocks.raw, blocks.table,
            blocks.raw_list, blocks.raw_count, blocks.cursors, bases,
            new, max_tokens, memory.capacity, blocks.pool.numel(), blocks.raw.shape[0], kv_heads,
            *keys.stride()[:3], *values.stride()[:3],
            T=1 << (new - 1).bit_length(), RING=ring, SEAL_AT=BLOCK_TOKENS + KEEP_TOKENS,
            HEAD_DIM=head_dim, D=head_dim, SLOT=blocks.words.shape[1], num_warps=16,
        )  # fmt: skip
    return after
