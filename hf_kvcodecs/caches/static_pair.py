"""Keys and values of one layer at addresses that never change, for CUDA graphs."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from ..errors import CacheMisuseError
from ..kernels.exponent_pack import register_pack
from ..kernels.exponent_unpack import register_unpack
from ..kernels.packed_append import KEEP_TOKENS, RING_TOKENS, StaticBlocks
from ..kernels.register_blocks import BLOCK_TOKENS
from .fused import POOL_WORDS, in_place

RAW_SHARE = 1 / 128  # of all blocks, reserved for those that stay raw; real caches have none


class StaticPair:
    """What :class:`hf_kvcodecs.caches.fused.FusedPair` is, for at most ``max_tokens`` tokens.

    How many there are is known to the device alone, so that a captured graph can add to them;
    asking for it here waits for the device. Room for escapes and raw blocks is reserved by what the
    prompt needed. Should a later text need more, attention turns to NaN and :meth:`check` raises.
    """

    @in_place
    def __init__(self, keys: torch.Tensor, values: torch.Tensor, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._begin(keys, values)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Memory for these tokens, and for others of their kind up to ``max_tokens``."""
        blocks = max((self.max_tokens - KEEP_TOKENS) // BLOCK_TOKENS, 1)
        rows, head_dim = keys.shape[0] * keys.shape[1], keys.shape[3]
        words, share = POOL_WORDS * head_dim // 128, RAW_SHARE
        while True:
            self.memory = StaticBlocks.allocate(
                keys,
                blocks,
                pool_words=rows * blocks * words,
                raw_slots=rows + math.ceil(rows * blocks * share),
            )
            self._write(keys, values)
            pool, raw, lost = self.memory.blocks().cursors.tolist()
            sealed = rows * self.sealed_blocks
            if not lost and pool <= words * sealed and raw <= math.ceil(share * sealed):
                break
            # Doubled, not fitted: sizes that differ with every prompt would be compiled for anew.
            while pool > words * sealed:
                words *= 2
            while raw > math.ceil(share * sealed):
                share *= 2
        torch._dynamo.mark_static_address(self.memory.memory)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """These tokens instead of what is held."""
        sealed = max((keys.shape[2] - KEEP_TOKENS) // BLOCK_TOKENS, 0)
        size = sealed * BLOCK_TOKENS
        self.memory.tables.zero_()
        register_pack(keys[:, :, :size], values[:, :, :size], self.memory.blocks())
        self._write_ring(size, keys[:, :, size:], values[:, :, size:])
        self._set(keys.shape[2], sealed)

    def _write_ring(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        places = torch.arange(first, first + keys.shape[2], device=keys.device) % RING_TOKENS
        # As integers: torch's deterministic index_copy_ changes the payloads of some NaN.
        ring = self.memory.ring.view(torch.int16)
        ring[0].index_copy_(2, places, keys.contiguous().view(torch.int16))
        ring[1].index_copy_(2, places, values.contiguous().view(torch.int16))

    def _set(self, tokens: int, sealed: int) -> None:
        self.memory.state[0].fill_(tokens)
        self.memory.state[1].fill_(sealed)

    @property
    def tokens(self) -> int:
        return int(self.memory.state[0, 0])

    @property
    def sealed_blocks(self) -> int:
        return int(self.memory.state[1, 0])

    @property
    def sealed_tokens(self) -> int:
        return self.sealed_blocks * BLOCK_TOKENS

    @property
    def batch(self) -> int:
        return self.memory.sizes[0]

    @property
    def device(self) -> torch.device:
        return self.memory.memory.device

    def shape(self, index: int) -> tuple[int, int, int, int]:
        """``[batch, kv_heads, tokens, head_dim]``."""
        batch, heads, head_dim, *_ = self.memory.sizes
        return batch, heads, self.tokens, head_dim

    def dtype(self, index: int) -> torch.dtype:
        return torch.bfloat16

    @property
    def dense_nbytes(self) -> int:
        """Bytes of as many tokens in a plain cache."""
        return self.tokens * self._numbers * 2

    @property
    def _numbers(self) -> int:
        """Numbers of one token."""
        return 2 * self.memory.rows * self.memory.sizes[2]

    @property
    def packed_elements(self) -> int:
        """Numbers in sealed blocks."""
        return self.sealed_tokens * self._numbers

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the memory held for sealed blocks, the part not yet used included."""
        return self.memory.memory.nbytes - self.tail_nbytes

    @property
    def tail_nbytes(self) -> int:
        return self.memory.ring.nbytes

    def check(self, new_tokens: int = 0) -> None:
        """Waits for the device.

        Raises:
            CacheMisuseError: tokens were lost, or ``new_tokens`` more would be.
        """
        held = self.tokens
        if held + new_tokens > self.max_tokens:
            raise CacheMisuseError(
                f"this cache holds {held} of at most {self.max_tokens} tokens, and {new_tokens} "
                "more do not fit. Make it with a larger max_tokens, or without one (it grows then)"
            )
        lost, unseen = self.memory.errors.tolist()
        if unseen:
            raise CacheMisuseError(
                "attention was asked for under a mask that is not causal with left padding, and "
                "has answered NaN: what was generated is not to be used. Make the cache without "
                "max_tokens: it then takes any mask"
            )
        if lost:
            raise CacheMisuseError(
                f"tokens were lost at a length of {held}: more were added than max_tokens="
                f"{self.max_tokens}, or keys and values pack far worse than those of the prompt. "
                "What was generated since is not to be used. Make the cache with a larger "
                "max_tokens, or without one (it grows then)"
            )

    @in_place
    def append(self, keys: torch.Tensor, values: torch.Tensor, seal: bool = True) -> StaticPair:
        """This pair with any number of tokens behind the others (waits for the device). ``seal`` is
        not used: whether a block is full does not depend on it."""
        self.check(keys.shape[2])
        tokens, sealed = self.tokens, self.sealed_blocks
        before = self.memory.tables.clone()
        first = sealed * BLOCK_TOKENS
        whole = torch.cat([self._ring(first, tokens), torch.stack([keys, values])], dim=3)
        count = max((whole.shape[3] - KEEP_TOKENS) // BLOCK_TOKENS, 0)
        size = count * BLOCK_TOKENS
        register_pack(whole[0, :, :, :size], whole[1, :, :, :size], self.memory.blocks(sealed))
        if int(self.memory.blocks().cursors[2]):  # more room is needed
            self.memory.tables.copy_(before)
            old = self.dense()
            new = (torch.cat(pair, dim=2) for pair in zip(old, (keys, values), strict=True))
            self._begin(*new)
            return self
        self._write_ring(first + size, whole[0, :, :, size:], whole[1, :, :, size:])
        self._set(tokens + keys.shape[2], sealed + count)
        return self

    def _ring(self, first: int, tokens: int) -> torch.Tensor:
        places = torch.arange(first, tokens, device=self.device) % RING_TOKENS
        return self.memory.ring.index_select(3, places)

    def dense(self, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values of the first ``tokens`` tokens, new tensors."""
        self.check()
        tokens = self.tokens if tokens is None else tokens
        batch, heads, head_dim, *_ = self.memory.sizes
        blocks = min(self.sealed_blocks, -(-tokens // BLOCK_TOKENS))
        out = self.memory.ring.new_empty(
            (2, batch, heads, max(tokens, blocks * BLOCK_TOKENS), head_dim)
        )
        size = blocks * BLOCK_TOKENS
        if blocks:
            register_unpack(
                self.memory.blocks(blocks), 0, blocks, into=out[:, :, :, :size].unbind()
            )
        if tokens > size:
            out[:, :, :, size:] = self._ring(size, tokens)
        keys, values = out[:, :, :, :tokens]
        return keys, values

    @in_place
    def crop(self, tokens: int, seal: bool = True) -> StaticPair:
        """The first ``tokens`` tokens, at the same addresses."""
        if tokens >= self.sealed_tokens:
            self.memory.state[0].fill_(tokens)
        else:
            self._write(*self.dense(tokens))
        return self

    @in_place
    def select_batch(self, index: torch.Tensor) -> StaticPair:
        """Rows ``index`` (int64) of the batch, in that order, repeats allowed; as many rows as
        before stay at the same addresses."""
        index = index.to(self.device)
        if len(index) != self.batch:
            keys, values = self.dense()
            return StaticPair(
                keys.index_select(0, index), values.index_select(0, index), self.max_tokens
            )
        # Sealed blocks stay where they are. A row seals into slots of its own, and never into one
        # that a table names: all rows have sealed equally many.
        blocks = self.memory.blocks()
        for tables in (blocks.table, blocks.raw_list, blocks.raw_count):
            tables.copy_(tables.index_select(0, index))
        self.memory.ring.copy_(self.memory.ring.index_select(1, index))
        return self

    def snapshot(self) -> StaticPair:
        return self

    @in_place
    def __deepcopy__(self, memo: dict[int, Any]) -> StaticPair:
        pair = copy.copy(self)
        pair.memory = StaticBlocks(self.memory.memory.clone(), self.memory.sizes)
        torch._dynamo.mark_static_address(pair.memory.memory)
        return pair
