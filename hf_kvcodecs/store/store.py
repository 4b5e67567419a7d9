"""``ChunkStore``: keys and values of texts seen before, bounded in bytes, shared by many caches."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

import torch

from ..errors import CorruptDataError, UnsupportedLayoutError
from .chunk import KV, Chunk, Match
from .chunkers import Chunker, make_chunker
from .files import HEAD_BYTES, from_bytes, head_bytes, read_chunk, to_bytes
from .hashing import Ids, space_salt
from .index import ChunkIndex
from .packing import Packed, check_codec, pack, packed_bytes, unpack
from .tiers import DiskTier, Tier, remote_tier

LOG = logging.getLogger("hf_kvcodecs.store")
REFRESH_SECONDS = 1.0  # how old the list of what other processes wrote may be
T = TypeVar("T")
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(size: int | str) -> int:
    """A number of bytes from 2048, "2GiB" or "1.5 GB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    if match is None or match[2].lower() not in UNITS or float(match[1]) <= 0:
        raise ValueError(f'expected a size such as 2048, "512MiB" or "2GiB", got {size!r}')
    return int(float(match[1]) * UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds and what became of the lookups so far.

    ``chunks`` and ``bytes`` are those in memory, ``known_chunks`` also those on disk or remote;
    ``damaged`` files were removed, ``failures`` are of the disk or the server.
    """

    chunks: int
    bytes: int
    max_bytes: int
    known_chunks: int
    pinned: int
    loads: int
    misses: int
    stored: int
    evicted: int
    rejected: int
    damaged: int
    failures: int


@dataclass(slots=True)
class _Held:
    """A chunk in memory."""

    space: ChunkSpace
    chunk: Chunk
    packed: Packed
    nbytes: int
    importance: float
    used: int
    hits: int = 0


@dataclass(slots=True)
class _Counts:
    loads: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    rejected: int = 0
    damaged: int = 0
    failures: int = 0


class ChunkStore:
    """Keys and values of chunks of text, found by what stands before them or by their tokens.

    Thread-safe; any number of caches and models may share one. Memory holds at most ``max_bytes``:
    beyond it the chunk goes whose importance (the norm of its keys and values), recency and use,
    over the number of chunks with the same tokens, are worth least; per byte, so that length
    neither helps nor hurts. With ``disk`` or ``remote`` every chunk is written there too, and comes
    back from there.

    Args:
        max_bytes: a number, or a size such as "2GiB".
        chunker: "paragraph", "fixed", "document", or an object with ``cuts(ids, ends)``.
        codec: None keeps the very numbers, "gaac" packs them without loss, "int8" and "int4" are
            lossy (then nothing served is exact).
        disk: a folder, which processes may share.
        disk_bytes: bound of that folder; None for none.
        remote: "redis://...", or any fsspec URL.
        namespace: tenants with different namespaces never see each other's chunks.
        device: where memory is: None for the device that computed a chunk, or "cpu".

    Raises:
        ValueError: an option out of range.
        ImportError: ``remote`` needs a package that is not installed.
    """

    def __init__(
        self,
        *,
        max_bytes: int | str = "2GiB",
        chunker: str | Chunker = "paragraph",
        codec: str | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | str | None = None,
        remote: str | None = None,
        namespace: str = "",
        device: str | torch.device | None = None,
    ) -> None:
        check_codec(codec)
        self.max_bytes = parse_bytes(max_bytes)
        self.chunker, self.codec, self.namespace = make_chunker(chunker), codec, namespace
        self.device = None if device is None else torch.device(device)
        bound = None if disk_bytes is None else parse_bytes(disk_bytes)
        self.tiers: list[Tier] = [DiskTier(disk, bound)] if disk is not None else []
        self.tiers += [remote_tier(remote)] if remote is not None else []
        self.lock = threading.RLock()
        self.counts = _Counts()
        self._spaces: dict[str, ChunkSpace] = {}
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._pinned: set[tuple[str, bytes]] = set()
        self._nbytes = self._tick = 0
        self._mean_norm = 0.0

    @property
    def exact(self) -> bool:
        """Whether chunks come back bit for bit."""
        return self.codec in (None, "gaac")

    def space(self, identity: str) -> ChunkSpace:
        """The chunks of one model: ``identity`` is anything that tells models apart."""
        # How numbers are kept decides what they are when they come back.
        salt = space_salt(f"{identity}|{'exact' if self.exact else self.codec}", self.namespace)
        name = salt.hex()[:32]
        with self.lock:
            if name not in self._spaces:
                self._spaces[name] = ChunkSpace(self, name, salt)
            return self._spaces[name]

    def stats(self) -> StoreStats:
        """Counts at this moment."""
        with self.lock:
            return StoreStats(
                chunks=len(self._held),
                bytes=self._nbytes,
                max_bytes=self.max_bytes,
                known_chunks=sum(len(space.index.chunks) for space in self._spaces.values()),
                pinned=len(self._pinned),
                **asdict(self.counts),
            )

    def verify(self) -> int:
        """Reads every file of the spaces in use and removes damaged ones; how many those were."""
        before = self.counts.damaged
        for space in list(self._spaces.values()):
            for tier in self.tiers:
                for name in space.names(tier):
                    space.read(tier, name)
        return self.counts.damaged - before

    def clear(self) -> None:
        """Forgets every chunk, pinned ones too, in every tier."""
        with self.lock:
            self._held.clear()
            self._pinned.clear()
            self._nbytes = 0
            for space in self._spaces.values():
                space.index = ChunkIndex(space.salt)
        for tier in self.tiers:
            self.attempt(tier.clear, None)

    def attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """``action()``; a failing medium is counted and answered with ``otherwise``."""
        try:
            return action()
        except OSError as error:
            self.counts.failures += 1
            LOG.warning("A chunk store's disk or server failed; it is left out: %s", error)
            return otherwise

    # What follows is for ChunkSpace, under the lock.

    def held(self, key: tuple[str, bytes]) -> _Held | None:
        return self._held.get(key)

    def touch(self, key: tuple[str, bytes]) -> None:
        """Notes a use."""
        entry = self._held.get(key)
        if entry is not None:
            entry.used, entry.hits = self._tick, entry.hits + 1

    def begin(self) -> None:
        """A new operation: what is added or used from now on is the most recent."""
        self._tick += 1

    def admit(self, space: ChunkSpace, chunk: Chunk, packed: Packed, norm: float) -> bool:
        """Takes a chunk into memory, evicting others; False if it does not fit."""
        key = (space.name, chunk.chain)
        nbytes = packed_bytes(*packed) + chunk.ids.nbytes
        self.drop(key)
        if not self._make_room(nbytes):
            self.counts.rejected += 1
            return False
        self._mean_norm = self._mean_norm * 0.99 + norm * 0.01 if self._mean_norm else norm
        importance = min(max(norm / self._mean_norm, 0.5), 2.0) if self._mean_norm else 1.0
        self._held[key] = _Held(
            space=space, chunk=chunk, packed=packed, nbytes=nbytes, importance=importance,
            used=self._tick,
        )  # fmt: skip
        self._nbytes += nbytes
        return True

    def drop(self, key: tuple[str, bytes]) -> None:
        """Takes a chunk out of memory."""
        entry = self._held.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes

    def pin(self, keys: Iterable[tuple[str, bytes]], pinned: bool) -> None:
        """Pinned chunks are never evicted."""
        for key in keys:
            self._pinned.add(key) if pinned else self._pinned.discard(key)

    def _make_room(self, nbytes: int) -> bool:
        excess = self._nbytes + nbytes - self.max_bytes
        if excess <= 0:
            return True
        # What this very operation added or used stays: a long prompt must not push out its own
        # beginning.
        others = [
            (self._worth(entry), -entry.chunk.position, key)
            for key, entry in self._held.items()
            if entry.used < self._tick and key not in self._pinned
        ]
        if sum(self._held[key].nbytes for _, _, key in others) < excess:
            return False
        for _, _, key in sorted(others):
            entry = self._held[key]
            self.drop(key)
            self.counts.evicted += 1
            entry.space.evicted(entry.chunk)
            excess -= entry.nbytes
            if excess <= 0:
                break
        return True

    def _worth(self, entry: _Held) -> float:
        age = self._tick - entry.used
        copies = max(entry.space.index.copies(entry.chunk), 1)
        return entry.importance * math.sqrt(1 + entry.hits) / ((1 + age) * copies)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"ChunkStore({stats.chunks} chunks, {stats.bytes / 2**20:.1f} of "
            f"{stats.max_bytes / 2**20:.0f} MiB, codec={self.codec!r}, chunker={self.chunker!r}, "
            f"tiers={['memory', *(type(tier).__name__ for tier in self.tiers)]})"
        )


@dataclass(slots=True, eq=False)
class ChunkSpace:
    """One model's chunks in one store's namespace; made by :meth:`ChunkStore.space`."""

    store: ChunkStore
    name: str
    salt: bytes
    index: ChunkIndex = field(init=False)
    _refreshed: float = -REFRESH_SECONDS

    def __post_init__(self) -> None:
        self.index = ChunkIndex(self.salt)

    def match(self, ids: Ids, position: int = 0) -> Match:
        """What of a prompt is known, see :meth:`ChunkIndex.match`."""
        self.refresh()
        with self.store.lock:
            return self.index.match(ids, position)

    def load(self, chunk: Chunk) -> KV | None:
        """A chunk's keys and values ``[layers, kv_heads, tokens, head_dim]``, not to be changed;
        None (and the chunk is forgotten) if no tier has it any more."""
        key, store = (self.name, chunk.chain), self.store
        with store.lock:
            store.begin()
            entry = store.held(key)
            packed = entry.packed if entry else None
            store.touch(key)
        packed = packed or self._fetch(chunk)
        with store.lock:
            if packed is not None:
                store.counts.loads += 1
                return unpack(*packed)
            store.counts.misses += 1
            self.index.remove(chunk.chain)
        return None

    def put(self, chunks: Iterable[tuple[Chunk, Callable[[], KV]]]) -> int:
        """Adds chunks of one text in order, each with a function that gives its keys and values
        (called only if they are new); how many tokens were new."""
        store, new = self.store, 0
        with store.lock:
            store.begin()
        for chunk, states in chunks:
            key = (self.name, chunk.chain)
            with store.lock:
                if store.held(key):
                    store.touch(key)
                    continue
                known = chunk.chain in self.index.chunks
            keys, values = states()
            packed = pack((self._placed(keys), self._placed(values)), store.codec)
            norm = _norm_per_token(keys, values)
            new += chunk.tokens
            if store.tiers and not known:
                data = to_bytes(chunk, packed)
                for tier in store.tiers:
                    write = partial(tier.write, self.name, chunk.chain.hex(), data)
                    store.attempt(write, None)
            with store.lock:
                if store.admit(self, chunk, packed, norm) or store.tiers:
                    self.index.add(chunk)
                    store.counts.stored += 1
        return new

    def pin(self, chunks: Iterable[Chunk], pinned: bool = True) -> None:
        """Keeps ``chunks`` from eviction, or no longer."""
        with self.store.lock:
            self.store.pin([(self.name, chunk.chain) for chunk in chunks], pinned)

    def evicted(self, chunk: Chunk) -> None:
        """A chunk left memory: it is known as long as another tier may have it."""
        if not self.store.tiers:
            self.index.remove(chunk.chain)

    def refresh(self) -> None:
        """Learns what other processes wrote, at most once in ``REFRESH_SECONDS``."""
        store = self.store
        with store.lock:
            if not store.tiers or time.monotonic() - self._refreshed < REFRESH_SECONDS:
                return
            self._refreshed = time.monotonic()
        for tier in store.tiers:
            for name in self.names(tier):
                chain = _chain_of(name)
                with store.lock:
                    new = chain is not None and chain not in self.index.chunks
                if new:
                    self.read(tier, name, only_head=True)

    def names(self, tier: Tier) -> set[str]:
        """What a tier has of this space; nothing if it fails."""
        nothing: set[str] = set()
        return self.store.attempt(partial(tier.names, self.name), nothing)

    def read(self, tier: Tier, name: str, only_head: bool = False) -> Packed | None:
        """A file's tensors; a damaged one is removed. With ``only_head`` it is only made known."""
        store = self.store
        try:
            chain = _chain_of(name)
            if chain is None:
                raise CorruptDataError("a file under a name that is no chunk's")
            packed = None
            if only_head:
                chunk = self._read_head(tier, name, chain)
            else:
                data = store.attempt(lambda: tier.read(self.name, name), None)
                if data is None:
                    return None
                chunk, packed = from_bytes(self.salt, chain, data)
        except CorruptDataError as error:
            LOG.warning("A damaged chunk was removed: %s", error)
            with store.lock:
                store.counts.damaged += 1
            store.attempt(lambda: tier.remove(self.name, name), None)
            return None
        except UnsupportedLayoutError as error:  # another release's: left alone
            LOG.warning("A chunk was passed over: %s", error)
            return None
        if chunk is not None:
            with store.lock:
                self.index.add(chunk)
        return packed

    def _read_head(self, tier: Tier, name: str, chain: bytes) -> Chunk | None:
        head = self.store.attempt(lambda: tier.head(self.name, name, HEAD_BYTES), None)
        if head is not None and HEAD_BYTES <= len(head) < head_bytes(head) < 2**30:
            wanted = head_bytes(head)
            head = self.store.attempt(lambda: tier.head(self.name, name, wanted), None)
        return None if head is None else read_chunk(self.salt, chain, head)

    def _fetch(self, chunk: Chunk) -> Packed | None:
        """A chunk from disk or remote, taken into memory again."""
        for tier in self.store.tiers:
            packed = self.read(tier, chunk.chain.hex())
            if packed is not None:
                with self.store.lock:
                    norm = self.store._mean_norm or 1.0
                    self.store.admit(self, chunk, packed, norm)
                return packed
        return None

    def _placed(self, states: torch.Tensor) -> torch.Tensor:
        return states if self.store.device is None else states.to(self.store.device)


def _chain_of(name: str) -> bytes | None:
    try:
        chain = bytes.fromhex(name)
    except ValueError:
        return None
    return chain if len(chain) == 32 else None


def _norm_per_token(keys: torch.Tensor, values: torch.Tensor) -> float:
    """Mean l2 norm of a token's keys and values: the same scale for every length."""
    norms = [torch.linalg.vector_norm(states, dtype=torch.float32) for states in (keys, values)]
    return float(torch.stack(norms).norm()) / math.sqrt(max(keys.shape[2], 1))
