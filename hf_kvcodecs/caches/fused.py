"""Keys and values of one layer on a GPU: sealed blocks that fused attention reads, a dense tail."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import CacheMisuseError
from ..kernels.dispatch import fused_device
from ..kernels.exponent_pack import register_pack
from ..kernels.exponent_unpack import register_unpack
from ..kernels.packed_attention import packed_attention, unsupported_reason
from ..kernels.register_blocks import BLOCK_TOKENS, HEAD_DIMS, RegisterBlocks
from ..kernels.self_test import kernels_fail
from .compat import notice_once

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Dense tokens kept behind the sealed ones: a crop of a few tokens (drafts) opens no block.
KEEP_TOKENS = 64
TAIL_TOKENS = BLOCK_TOKENS + 2 * KEEP_TOKENS
POOL_WORDS = 384  # reserved per block of 128 channels; real caches take about 270


def in_place(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes ordinary tensors whatever mode the caller is in: one made under ``inference_mode``
    could not be written outside of it."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped


def can_fuse(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether states like these can be kept as a :class:`FusedPair`."""
    if not (
        keys.dtype == values.dtype == torch.bfloat16
        and keys.shape == values.shape
        and keys.shape[3] in HEAD_DIMS
        and keys.device == values.device
        and fused_device(keys.device)
    ):
        return False
    failure = kernels_fail(keys.device, keys.shape[3])
    if failure is not None:
        notice_once(
            f"GAACCache unpacks with plain torch on {keys.device}, slower and just as exact: its "
            f"Triton kernels do not work there ({failure})."
        )
    return failure is None


class FusedPair:
    """What :class:`hf_kvcodecs.caches.pair.KVPair` is, in memory that is written in place.

    A token is copied once into the tail, and once more into a block when that is sealed; nothing
    else moves. Sealing does not wait for the device: room for the blocks of one call that may stay
    raw is there beforehand. A view of an earlier state reads its tokens from here as long as they
    are the first ones; after a crop or a change of the batch it raises.
    """

    @in_place
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, heads, _, head_dim = keys.shape
        self.tokens = 0
        self.epoch = 0
        self.broken = False
        self.blocks = RegisterBlocks.allocate(
            batch, heads, head_dim, 0, keys.device, pool_words=0, raw_slots=0
        )
        self.tail = keys.new_empty((2, batch, heads, 0, head_dim))
        self._cursors: torch.Tensor | None = None  # pinned, once a seal was launched
        self._settled: torch.cuda.Event | None = None
        self._pool_used = self._raw_used = 0

    @property
    def batch(self) -> int:
        return self.tail.shape[1]

    @property
    def sealed_blocks(self) -> int:
        return self.blocks.blocks

    @property
    def sealed_tokens(self) -> int:
        return self.sealed_blocks * BLOCK_TOKENS

    @property
    def tail_tokens(self) -> int:
        return self.tokens - self.sealed_tokens

    @property
    def device(self) -> torch.device:
        return self.tail.device

    def shape(self, index: int) -> tuple[int, int, int, int]:
        """``[batch, kv_heads, tokens, head_dim]``."""
        _, batch, heads, _, head_dim = self.tail.shape
        return batch, heads, self.tokens, head_dim

    def dtype(self, index: int) -> torch.dtype:
        return self.tail.dtype

    @property
    def dense_nbytes(self) -> int:
        """Bytes of as many tokens in a plain cache."""
        return self.tokens * self.tail[:, :, :, 0].numel() * 2 if self.tokens else 0

    @property
    def packed_elements(self) -> int:
        """Numbers in sealed blocks."""
        _, batch, heads, _, head_dim = self.tail.shape
        return 2 * batch * heads * head_dim * self.sealed_tokens

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the memory held for sealed blocks, the part not yet used included."""
        held = self.blocks
        tensors = (held.words, held.pool, held.raw, held.table, held.raw_list, held.raw_count)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def tail_nbytes(self) -> int:
        return self.tail.nbytes

    @in_place
    def append(self, keys: torch.Tensor, values: torch.Tensor, seal: bool = True) -> FusedPair:
        """This pair with new tokens behind the others; full blocks are sealed if ``seal``."""
        self._check_whole()
        self.broken = True
        self._append(keys, values, seal)
        self.broken = False
        return self

    def _check_whole(self) -> None:
        if self.broken:
            raise CacheMisuseError(
                "an update of this cache failed half way (out of memory, or an interrupt), and its "
                "contents are not to be trusted any more. Call reset() or take a new cache"
            )

    def _append(self, keys: torch.Tensor, values: torch.Tensor, seal: bool) -> None:
        held, new = self.tail_tokens, keys.shape[2]
        blocks = max((held + new - KEEP_TOKENS) // BLOCK_TOKENS, 0) if seal else 0
        size = blocks * BLOCK_TOKENS
        if blocks and held == 0:  # a prompt: straight from the states
            self._seal(keys[:, :, :size], values[:, :, :size])
            keys, values = keys[:, :, size:], values[:, :, size:]
        elif held + new <= self.tail.shape[3]:
            self._write(held, keys, values)
            if blocks:
                self._seal(*self.tail[:, :, :, :size])
                keys, values = self.tail[:, :, :, size : held + new].clone()
        elif blocks:
            whole = torch.cat([self.tail[:, :, :, :held], torch.stack([keys, values])], dim=3)
            self._seal(*whole[:, :, :, :size])
            keys, values = whole[:, :, :, size:]
        if blocks:
            self._fit_tail(0, keys.shape[2], TAIL_TOKENS)
            self._write(0, keys, values)
        elif held + new > self.tail.shape[3]:
            self._fit_tail(held, held + new, max(TAIL_TOKENS, held + new + (held + new) // 8))
            self._write(held, keys, values)
        self.tokens += new

    def _fit_tail(self, kept: int, needed: int, capacity: int) -> None:
        """Room for ``needed`` tokens and, if that takes new memory, ``capacity``; the first
        ``kept`` stay. A tail that was far longer shrinks."""
        if needed <= self.tail.shape[3] <= 2 * capacity:
            return
        tail = self.tail.new_empty((*self.tail.shape[:3], capacity, self.tail.shape[4]))
        tail[:, :, :, :kept] = self.tail[:, :, :, :kept]
        self.tail = tail

    def _write(self, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.tail[0, :, :, at : at + keys.shape[2]] = keys
        self.tail[1, :, :, at : at + keys.shape[2]] = values

    def _seal(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Seals whole blocks."""
        count = keys.shape[2] // BLOCK_TOKENS
        rows = keys.shape[0] * keys.shape[1]
        self.settle()
        if count == 1:
            self._reserve(1, self._raw_used + rows)
            register_pack(keys, values, self.blocks)
            # Blocks that found no room in the pool have moved its cursor all the same.
            self.blocks.cursors[:1].clamp_(max=self.blocks.pool.numel())
            self._watch()
            return
        # Many at once (a prompt): room for few raw blocks, and again with more if that was wrong.
        before = self.blocks.blocks, self.blocks.cursors.clone(), self.blocks.raw_count.clone()
        pool_words, raw_slots = 0, self._raw_used + max(rows, rows * count // 64)
        while True:
            self._reserve(count, raw_slots, pool_words)
            register_pack(keys, values, self.blocks)
            self._watch()
            pool_words, raw_slots = self.settle()
            if pool_words <= self.blocks.pool.numel() and raw_slots <= self.blocks.raw.shape[0]:
                break
            self.blocks.blocks = before[0]
            self.blocks.cursors.copy_(before[1])
            self.blocks.raw_count.copy_(before[2])
            self._pool_used, self._raw_used, _ = before[1].tolist()
        room = self._pool_used + rows * POOL_WORDS * self.blocks.head_dim // 128
        self.blocks = self.blocks.resized(pool_words=room, raw_slots=self._raw_used + rows)

    def _reserve(self, count: int, raw_slots: int, pool_words: int = 0) -> None:
        """Room for ``count`` more blocks a row, ``raw_slots`` raw ones and ``pool_words`` words in
        the pool (or what usual blocks take, if that is more)."""
        held = self.blocks
        rows, needed = held.table.shape[0] * held.table.shape[1], held.blocks + count
        pool = self._pool_used + rows * count * POOL_WORDS * held.head_dim // 128
        pool = max(pool, pool_words)
        grow = needed > held.table.shape[2]
        if grow or pool > held.pool.numel() or raw_slots > held.raw.shape[0]:
            spare = max(2, needed // 32) if grow else 0
            self.blocks = held.resized(
                blocks=needed + spare if grow else held.table.shape[2],
                pool_words=max(pool + pool // 32, held.pool.numel()),
                raw_slots=max(raw_slots, held.raw.shape[0]),
            )

    def _watch(self) -> None:
        """Has the cursors copied to the host, without waiting."""
        if self.device.type == "cpu":
            self._cursors = self.blocks.cursors
            return
        if self._cursors is None:
            self._cursors = torch.empty(3, dtype=torch.int32, pin_memory=True)
        self._cursors.copy_(self.blocks.cursors, non_blocking=True)
        self._settled = torch.cuda.Event()
        self._settled.record(torch.cuda.current_stream(self.device))

    def settle(self) -> tuple[int, int]:
        """Waits for the last seal's cursors (long there when the next block is full); returns how
        many pool words and raw slots were wanted."""
        if self._cursors is None:
            return self._pool_used, self._raw_used
        if self._settled is not None:
            self._settled.synchronize()
            self._settled = None
        pool, raw, _ = self._cursors.tolist()
        self._pool_used = min(pool, self.blocks.pool.numel())
        self._raw_used = min(raw, self.blocks.raw.shape[0])
        return pool, raw

    def dense(self, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values of the first ``tokens`` tokens, new tensors."""
        self._check_whole()
        tokens = self.tokens if tokens is None else tokens
        _, batch, heads, _, head_dim = self.tail.shape
        out = self.tail.new_empty((2, batch, heads, tokens, head_dim))
        blocks, part = divmod(min(tokens, self.sealed_tokens), BLOCK_TOKENS)
        if blocks:
            register_unpack(
                self.blocks, 0, blocks, into=out[:, :, :, : blocks * BLOCK_TOKENS].unbind()
            )
        if part:
            opened = torch.stack(register_unpack(self.blocks, blocks, blocks + 1))
            out[:, :, :, tokens - part :] = opened[:, :, :, :part]
        if tokens > self.sealed_tokens:
            kept = tokens - self.sealed_tokens
            out[:, :, :, self.sealed_tokens :] = self.tail[:, :, :, :kept]
        keys, values = out
        return keys, values

    def attend(
        self, q: torch.Tensor, scale: float | None, starts: torch.Tensor | None
    ) -> torch.Tensor | None:
        """:func:`packed_attention` over all tokens; None where it cannot take ``q``."""
        self._check_whole()
        if unsupported_reason(q, self.blocks, scale) is not None:
            return None
        keys, values = self.tail[:, :, :, : self.tail_tokens]
        return packed_attention(q, self.blocks, keys, values, scale=scale, starts=starts)

    @in_place
    def crop(self, tokens: int, seal: bool = True) -> FusedPair:
        """The first ``tokens`` tokens; a cut into sealed blocks packs what is left anew, if
        ``seal``."""
        self._check_whole()
        self.epoch += 1
        if tokens >= self.sealed_tokens:
            self.tokens = tokens
            return self
        keys, values = self.dense(tokens)
        return self._new(keys, values).append(keys, values, seal)

    def _new(self, keys: torch.Tensor, values: torch.Tensor) -> FusedPair:
        """An empty pair of this kind."""
        return FusedPair(keys, values)

    @in_place
    def select_batch(self, index: torch.Tensor) -> FusedPair:
        """Rows ``index`` (int64) of the batch, in that order, repeats allowed. Sealed blocks stay
        where they are; the tables change."""
        self.epoch += 1
        index = index.to(self.device)
        return self._with(self.tail.index_select(1, index), self.blocks.rows(index))

    def snapshot(self) -> FusedSnapshot:
        return FusedSnapshot(self)

    @in_place
    def __deepcopy__(self, memo: dict[int, Any]) -> FusedPair:
        return self._with(self.tail.clone(), self.blocks.clone())

    def _with(self, tail: torch.Tensor, blocks: RegisterBlocks) -> FusedPair:
        """As many tokens in other memory."""
        self._check_whole()
        self.settle()
        pair = copy.copy(self)
        pair.epoch, pair.tail, pair.blocks = 0, tail, blocks
        pair._cursors = pair._settled = None
        return pair


class FusedSnapshot:
    """The tokens of a :class:`FusedPair` at one moment, for the views that ``update`` returns."""

    def __init__(self, pair: FusedPair) -> None:
        self.pair, self.tokens, self.epoch = pair, pair.tokens, pair.epoch
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.pair.device

    @property
    def sealed_tokens(self) -> int:
        return self.pair.sealed_tokens

    @property
    def current(self) -> bool:
        """Whether the pair still holds these tokens and no others."""
        return self.epoch == self.pair.epoch and self.tokens == self.pair.tokens

    def shape(self, index: int) -> tuple[int, int, int, int]:
        batch, heads, _, head_dim = self.pair.shape(index)
        return batch, heads, self.tokens, head_dim

    def dtype(self, index: int) -> torch.dtype:
        return self.pair.dtype(index)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values, decoded at the first call.

        Raises:
            CacheMisuseError: the cache was cropped or its batch changed since.
        """
        if self._dense is None:
            if self.epoch != self.pair.epoch:
                raise CacheMisuseError(
                    "these keys and values are of a state that the cache has left by a crop or a "
                    "change of its batch. Clone them before, or ask the cache again"
                )
            self._dense = self.pair.dense(self.tokens)
        return self._dense
