"""``ChunkStore``: keys and values of texts seen before, bounded in bytes, shared by many caches."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import torch

from .chunk import Chunk
from .chunkers import Chunker, make_chunker
from .hashing import namespace_name, space_salt
from .index import ChunkIndex
from .lock import StoreLock
from .packing import Packed, check_codec, packed_bytes
from .space import ChunkSpace
from .tiers import DiskTier, Tier, remote_tier

LOG = logging.getLogger("hf_kvcodecs.store")
T = TypeVar("T")
REST_FACTOR = 10.0  # a failing tier takes at most a tenth of the time
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
    used: int
    norm: torch.Tensor | None  # not looked at yet, on the device that computed it
    importance: float = 1.0
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
        self.lock = StoreLock()
        self.counts = _Counts()
        self._spaces: dict[str, ChunkSpace] = {}
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._pinned: set[tuple[str, bytes]] = set()
        self._nbytes = self._tick = 0
        self._mean_norm = 0.0
        self._rests_until: dict[int, float] = {}  # by tier
        self._told: set[tuple[int, type]] = set()  # one notice for each kind of failure

    @property
    def exact(self) -> bool:
        """Whether chunks come back bit for bit."""
        return self.codec in (None, "gaac")

    def space(self, identity: str) -> ChunkSpace:
        """The chunks of one model: ``identity`` is anything that tells models apart."""
        # How numbers are kept decides what they are when they come back.
        salt = space_salt(f"{identity}|{'exact' if self.exact else self.codec}", self.namespace)
        name = namespace_name(self.namespace) + salt.hex()[:16]
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
        """Forgets every chunk of this namespace, pinned ones and other models' too, in every tier;
        what other namespaces have there stays."""
        with self.lock:
            self._held.clear()
            self._pinned.clear()
            self._nbytes = 0
            for space in self._spaces.values():
                space.index = ChunkIndex(space.salt)
        for tier in self.tiers:
            self.attempt(tier, partial(tier.clear, namespace_name(self.namespace)), None)

    def attempt(self, tier: Tier, action: Callable[[], T], otherwise: T) -> T:
        """``action()`` of ``tier``; a failure is counted and answered with ``otherwise``, like
        everything for ten times as long as the failure took: a server that does not answer costs no
        timeout for every chunk."""
        began = time.monotonic()
        if began < self._rests_until.get(id(tier), began):
            return otherwise
        try:
            return action()
        except Exception as error:  # drivers of filesystems raise what they like
            now = time.monotonic()
            self._rests_until[id(tier)] = now + REST_FACTOR * (now - began)
            with self.lock:
                self.counts.failures += 1
            kind = (id(tier), type(error))
            LOG.log(
                logging.DEBUG if kind in self._told else logging.WARNING,
                "A chunk store's disk or server failed; what it has is missed: %r", error,
            )  # fmt: skip
            self._told.add(kind)
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

    def admit(
        self, space: ChunkSpace, chunk: Chunk, packed: Packed, norm: torch.Tensor | None
    ) -> bool:
        """Takes a chunk into memory, evicting others; False if it does not fit.

        ``norm`` of its keys and values decides how much it is worth; None if that is unknown.
        """
        key = (space.name, chunk.chain)
        nbytes = packed_bytes(*packed) + chunk.ids.nbytes
        self.drop(key)
        if not self._make_room(nbytes):
            self.counts.rejected += 1
            return False
        self._held[key] = _Held(
            space=space, chunk=chunk, packed=packed, nbytes=nbytes, used=self._tick, norm=norm
        )
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
        self._weigh()
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

    def _weigh(self) -> None:
        """Turns the norms that came in since the last time into importances: one transfer."""
        new = [entry for entry in self._held.values() if entry.norm is not None]
        if not new:
            return
        norms = [entry.norm for entry in new if entry.norm is not None]
        if len({norm.device for norm in norms}) > 1:
            norms = [norm.cpu() for norm in norms]
        for entry, norm in zip(new, torch.stack(norms).tolist(), strict=True):
            self._mean_norm = self._mean_norm * 0.99 + norm * 0.01 if self._mean_norm else norm
            if self._mean_norm:
                entry.importance = min(max(norm / self._mean_norm, 0.5), 2.0)
            entry.norm = None

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
