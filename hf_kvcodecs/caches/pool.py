"""Memory for the packed blocks and the dense tails of many caches: one budget, no growth."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..errors import CacheMisuseError, PoolFullError
from ..kernels.dispatch import triton_missing
from ..kernels.register_blocks import (
    BLOCK_TOKENS,
    HEAD_DIMS,
    MAX_POOL_WORDS,
    slot_words,
)
from .fused import KEEP_TOKENS, TAIL_TOKENS, in_place

# Words for escapes and patches at the end of each slot, by channels. Of SmolLM2's blocks (code,
# prose, a licence) one in a thousand needs more and stays raw; 11.58 bits a number all-in, and no
# other size takes less.
ESCAPE_WORDS = 3.5
RAW_SHARE = 1 / 64  # raw slots, of all packed ones
TAIL_SHARE = 1 / 8  # of the bytes, for the dense tails, unless `rows` says how many


def blocks_of(tokens: int) -> int:
    """The most sealed blocks that a row of ``tokens`` tokens has."""
    return max((tokens - KEEP_TOKENS) // BLOCK_TOKENS, 0)


class FreeList:
    """The numbers ``0 .. total - 1``, each free or held by one :class:`Holding`."""

    def __init__(self, total: int, lock: threading.RLock) -> None:
        self.total, self._lock = total, lock
        self._free = list(range(total - 1, -1, -1))
        # What dead holdings had. Appending is all that happens when one dies, which may be at any
        # moment, also within the methods below.
        self._returned: deque[list[int]] = deque()

    def _collect(self) -> None:
        while self._returned:
            numbers = self._returned.popleft()
            self._free += numbers
            numbers.clear()

    @property
    def free(self) -> int:
        """How many are free."""
        with self._lock:
            self._collect()
            return len(self._free)

    def take(self, count: int, holding: Holding) -> bool:
        """Hands ``count`` numbers to ``holding``, or none (False) where there are fewer."""
        with self._lock:
            self._collect()
            if count > len(self._free):
                return False
            if count:
                holding.numbers += self._free[-count:][::-1]
                del self._free[-count:]
            return True

    def take_run(self, count: int, holding: Holding) -> bool:
        """:meth:`take`, for numbers that follow each other."""
        with self._lock:
            self._collect()
            if count == 0:
                return True
            self._free.sort(reverse=True)
            for end in range(len(self._free), count - 1, -1):
                if self._free[end - count] == self._free[end - 1] + count - 1:
                    holding.numbers += self._free[end - count : end][::-1]
                    del self._free[end - count : end]
                    return True
            return False

    def give_back(self, numbers: list[int], holding: Holding) -> None:
        """Takes ``numbers`` from ``holding``."""
        with self._lock:
            gone = set(numbers)
            holding.numbers[:] = [number for number in holding.numbers if number not in gone]
            self._free += numbers


class Holding:
    """Numbers taken from a :class:`FreeList`; they go back when this object dies."""

    def __init__(self, source: FreeList) -> None:
        self.source = source
        self.numbers: list[int] = []
        weakref.finalize(self, source._returned.append, self.numbers).atexit = False


@dataclass(slots=True, eq=False)
class PoolLayer:
    """What all caches hold of one layer.

    Attributes:
        words: int32 ``[blocks * kv_heads, n]``: packed slots, the pool of each at its end. Block
            ``b`` of the pool is slots ``b * kv_heads ..`` and serves one block of one row.
        raw: int16 ``[raw slots, 2, 128, head_dim]``.
        tails: bf16 ``[rows, 2, kv_heads, 256, head_dim]``.
        free_raw: which raw slots are free.
        sealing: the pairs that may soon give back raw slots.
    """

    words: torch.Tensor
    raw: torch.Tensor
    tails: torch.Tensor
    free_raw: FreeList
    sealing: weakref.WeakSet[Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> PoolLayer:
        return self


class BlockPool:
    """Memory that many :class:`GAACCache` share, taken once and never more.

    ``pool = BlockPool(model.config, max_bytes=8 << 30, device="cuda")``, then for each sequence
    ``GAACCache(pool=pool, max_tokens=4096)``. A cache that would not fit is refused when it is made
    (rows of a batch beyond the first: when they come), with a :class:`PoolFullError` that says what
    it wants and what is free. What a cache held is free again once it dies or is reset.

    The budget covers packed slots, slots for blocks that stay raw, the dense tails and all tables,
    in every layer; what a step needs beside them for a moment is not in it. Threads may share a
    pool, each with caches of its own.

    Args:
        config: the model's config. Layers other than full attention keep transformers' own memory.
        max_bytes: the budget. Or
        tokens: how many tokens of full blocks there is to be room for.
        rows: sequences (rows of batches) at a time: each has a dense tail of 256 tokens. By default
            as many as an eighth of the memory holds.
        kv_heads: KV heads on this device, where a tensor-parallel model has fewer than ``config``
            says.
        raw_share: raw slots for each packed one, for blocks that do not fit their slots.
        device: where all of it is.

    Raises:
        ValueError: options out of range; a budget too small for one row; a model or device without
            fused kernels.
    """

    @in_place
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        max_bytes: int | None = None,
        tokens: int | None = None,
        rows: int | None = None,
        kv_heads: int | None = None,
        raw_share: float = RAW_SHARE,
        device: str | torch.device = "cuda",
    ) -> None:
        self.config, self.device = config, torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        missing = triton_missing(self.device)
        if missing:
            raise ValueError(
                f"device: a pool holds what fused kernels read, and they cannot take {missing}. "
                "Use GAACCache() without a pool"
            )
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        self.head_dim: int = getattr(text, "head_dim", None) or text.hidden_size // heads
        self.kv_heads: int = kv_heads or getattr(text, "num_key_value_heads", None) or heads
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(
                f"config: heads of {self.head_dim} channels have no packed form on a GPU, only of "
                f"{', '.join(map(str, HEAD_DIMS))}. Use GAACCache() without a pool"
            )
        layers = DynamicCache(config=config).layers
        self.layer_numbers = [n for n, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not self.layer_numbers:
            raise ValueError(
                f"config: {type(config).__name__} has no layer of plain full attention to pack"
            )
        self.slot_size = slot_words(self.head_dim) + int(ESCAPE_WORDS * self.head_dim)
        self._sizes(max_bytes, tokens, rows, raw_share)
        self.lock = threading.RLock()
        self._blocks = FreeList(self.blocks, self.lock)
        self._rows = FreeList(self.rows, self.lock)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.layers = {number: self._layer() for number in self.layer_numbers}

    def _sizes(
        self, max_bytes: int | None, tokens: int | None, rows: int | None, raw_share: float
    ) -> None:
        """How many blocks, rows and raw slots there are."""
        for name, value in (("max_bytes", max_bytes), ("tokens", tokens), ("rows", rows)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}: expected a positive number, got {value!r}")
        if (max_bytes is None) == (tokens is None):
            raise ValueError("BlockPool: expected one of max_bytes and tokens")
        if not 0 <= raw_share <= 1:
            raise ValueError(f"raw_share: expected 0 to 1, got {raw_share}")
        layers, heads = len(self.layer_numbers), self.kv_heads
        self.raw_bytes = 512 * self.head_dim * layers
        # The block itself and its places in a sequence's tables; a tail and its counts.
        self.block_bytes = heads * (4 * self.slot_size + 8) * layers
        self.row_bytes = heads * (2 * self.raw_bytes + 4 * layers)
        both = self.block_bytes + int(raw_share * heads * self.raw_bytes)
        least = heads * self.raw_bytes  # raw slots for one block of a row, whatever the share
        if tokens is not None:
            wanted = -(-tokens // BLOCK_TOKENS) * both
            tails = int(wanted * TAIL_SHARE / (1 - TAIL_SHARE))
            self.rows = rows or max(tails // self.row_bytes, 1)
            max_bytes = wanted + least + self.rows * self.row_bytes
        assert max_bytes is not None
        self.rows = rows or max(int(max_bytes * TAIL_SHARE) // self.row_bytes, 1)
        left = max_bytes - self.rows * self.row_bytes - least
        self.blocks = max(left // both, 0)
        if left < 0:
            raise ValueError(
                f"max_bytes: {self.rows} row(s) take {_mib(max_bytes - left)} before any block is "
                f"packed, got {_mib(max_bytes)}. Give more, or fewer rows"
            )
        self.raw_slots = heads + int(raw_share * heads * self.blocks)
        self.max_bytes = (
            self.blocks * self.block_bytes
            + self.rows * self.row_bytes
            + self.raw_slots * self.raw_bytes
        )
        if self.blocks * heads * self.slot_size >= MAX_POOL_WORDS:
            raise ValueError(
                f"BlockPool: {_mib(4 * self.blocks * heads * self.slot_size)} of packed blocks a "
                "layer; expected less than 4 GiB, which is what their tables can address. Make "
                "two pools"
            )

    def _layer(self) -> PoolLayer:
        slots = self.blocks * self.kv_heads
        words = torch.empty((max(slots, 1), self.slot_size), dtype=torch.int32, device=self.device)
        words[0] = 0  # attention runs over slot 0 in place of a raw block: finite numbers
        raw = torch.empty(
            (self.raw_slots, 2, BLOCK_TOKENS, self.head_dim), dtype=torch.int16, device=self.device
        )
        tails = torch.empty(
            (self.rows, 2, self.kv_heads, TAIL_TOKENS, self.head_dim),
            dtype=torch.bfloat16, device=self.device,
        )  # fmt: skip
        return PoolLayer(words, raw, tails, FreeList(self.raw_slots, self.lock), weakref.WeakSet())

    @property
    def free_blocks(self) -> int:
        """Blocks (of 128 tokens of one row, in every layer) that nobody holds."""
        return self._blocks.free

    @property
    def free_rows(self) -> int:
        """Tails that nobody holds."""
        return self._rows.free

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks and tails that nobody holds."""
        return self.free_blocks * self.block_bytes + self.free_rows * self.row_bytes

    def wanted_bytes(self, rows: int, max_tokens: int) -> int:
        """What admission of ``rows`` sequences of at most ``max_tokens`` tokens takes."""
        return rows * (blocks_of(max_tokens) * self.block_bytes + self.row_bytes)

    def admit(self, rows: int, blocks: int) -> Lease:
        """``rows`` tails and ``blocks`` blocks for each; raises :class:`PoolFullError` if there are
        too few, and takes none then."""
        with self.lock:
            lease = Lease(self, rows)
            if not self._rows.take_run(rows, lease.tails) or not lease.grow(blocks):
                wanted = rows * (blocks * self.block_bytes + self.row_bytes)
                del lease  # or its rows would not count as free
                self.refuse(wanted, f"{rows} row(s) of {blocks} block(s) each")
            return lease

    def refuse(self, wanted: int, what: str) -> None:
        """Raises the :class:`PoolFullError` of a request for ``wanted`` bytes."""
        rows = f"{self.free_rows} of {self.rows} rows"
        if self.free_rows > 1:
            rows += " (a batch needs neighbours)"
        raise PoolFullError(
            f"the pool has no room for {what}: {_mib(wanted)} wanted, {_mib(self.free_bytes)} of "
            f"{_mib(self.max_bytes)} free ({self.free_blocks} of {self.blocks} blocks of "
            f"{BLOCK_TOKENS} tokens, {rows}). Wait until other caches are gone (del or reset() "
            "them), ask for a smaller max_tokens or batch, or make the pool with more max_bytes "
            "or rows"
        )

    def used(self) -> None:
        """The current stream has work on the pool behind it, or is about to."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            self._streams[stream.cuda_stream] = stream

    def wait(self) -> None:
        """Memory changes hands: has the current stream wait for all that the others have to do."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for other in tuple(self._streams.values()):
                if other != stream:
                    stream.wait_stream(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPool:
        return self  # a copied cache is another one in the same pool

    def __repr__(self) -> str:
        return (
            f"BlockPool({_mib(self.max_bytes)} on {self.device}: {self.free_blocks} of "
            f"{self.blocks} blocks of {BLOCK_TOKENS} tokens and {self.free_rows} of {self.rows} "
            "rows are free)"
        )


class Lease:
    """Rows and blocks of a pool that one cache holds in all layers; free again when this dies."""

    def __init__(self, pool: BlockPool, rows: int) -> None:
        self.pool, self.rows = pool, rows
        self.blocks = 0  # of each row
        self.tails = Holding(pool._rows)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # the pairs, one of each layer
        self._blocks = Holding(pool._blocks)
        self._slots: torch.Tensor | None = None

    def grow(self, blocks: int) -> bool:
        """At least ``blocks`` blocks for each row; False, and nothing new, if there are too few."""
        more = max(blocks - self.blocks, 0)
        if not self.pool._blocks.take(more * self.rows, self._blocks):
            return False
        if more:
            self.blocks, self._slots = blocks, None
        return True

    def shrink(self, blocks: int) -> None:
        """Gives back all but ``blocks`` blocks of each row."""
        if blocks < self.blocks:
            gone = self._blocks.numbers[blocks * self.rows :]
            self.pool._blocks.give_back(gone, self._blocks)
            self.blocks, self._slots = blocks, None

    def slots(self) -> torch.Tensor:
        """int32 ``[rows, kv_heads, blocks]`` on the device: where each block is to be packed. The
        same tensor until the lease grows or shrinks."""
        if self._slots is None:
            # The n-th block of all rows, then the next: so a lease grows at its end.
            numbers = torch.tensor(self._blocks.numbers, dtype=torch.int32)
            heads = torch.arange(self.pool.kv_heads, dtype=torch.int32)[None, :, None]
            numbers = numbers.view(self.blocks, self.rows).t()[:, None]
            slots = (numbers * self.pool.kv_heads + heads).contiguous()  # kernels know no strides
            self._slots = slots.to(self.pool.device)
        return self._slots


class Seat:
    """The place of one cache in a pool: its present lease, the same for all its layers."""

    def __init__(self, pool: BlockPool, max_tokens: int | None) -> None:
        self.pool, self.max_tokens = pool, max_tokens
        self._lease: Lease | None = pool.admit(1, self._blocks)

    @property
    def _blocks(self) -> int:
        return blocks_of(self.max_tokens or 0)

    def lease(self, rows: int, blocks: int = 0) -> Lease:
        """The lease if it is of ``rows`` rows, or else a new one, of at least ``blocks`` blocks
        each; the old one lives as long as a layer uses it."""
        held = self._lease
        if held is not None and held.rows == rows:
            return held
        blocks = max(blocks, self._blocks)
        with self.pool.lock:
            before = None
            if held is not None and not held.users:  # admitted before the batch was known
                before = held.rows, held.blocks
                self._lease = held = None
            try:
                self._lease = self.pool.admit(rows, blocks)
            except PoolFullError:
                if before is not None:
                    self._lease = self.pool.admit(*before)
                raise
        return self._lease

    def ensure(self, lease: Lease, tokens: int, new_tokens: int) -> None:
        """Room for ``tokens`` tokens a row, ``new_tokens`` of them new; raises
        :class:`CacheMisuseError` or :class:`PoolFullError` if there is none."""
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise CacheMisuseError(
                f"this cache was admitted to its pool with max_tokens={self.max_tokens}; it holds "
                f"{tokens - new_tokens}, and {new_tokens} more do not fit. Make it with a larger "
                "max_tokens"
            )
        blocks = blocks_of(tokens)
        if not lease.grow(blocks):
            more = (blocks - lease.blocks) * lease.rows
            self.pool.refuse(more * self.pool.block_bytes, f"{more} more block(s)")

    def fit(self, lease: Lease) -> None:
        """Gives back blocks that a crop has made superfluous, unless ``max_tokens`` promises them.
        Once all layers are cropped."""
        if self.max_tokens is None:
            users = tuple(lease.users)
            lease.shrink(max(max(u.sealed_blocks, blocks_of(u.tokens)) for u in users))

    def give_back(self) -> None:
        """The cache was reset: it is admitted again with its next prompt."""
        self._lease = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Seat:
        twin = Seat.__new__(Seat)
        twin.pool, twin.max_tokens = self.pool, self.max_tokens
        held = self._lease
        twin._lease = None if held is None else self.pool.admit(held.rows, held.blocks)
        return twin


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
