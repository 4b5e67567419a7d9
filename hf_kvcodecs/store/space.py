"""One model's chunks in a store: found, loaded from whichever tier has them, written to all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import CorruptDataError, UnsupportedLayoutError
from .chunk import KV, Chunk, Match
from .files import HEAD_BYTES, from_bytes, head_bytes, read_chunk, to_bytes
from .hashing import Ids
from .index import ChunkIndex
from .packing import Packed, pack, unpack
from .tiers import Tier

if TYPE_CHECKING:
    from .store import ChunkStore

LOG = logging.getLogger("hf_kvcodecs.store")
REFRESH_SECONDS = 1.0  # how old the list of what other processes wrote may be


@dataclass(slots=True, eq=False)
class ChunkSpace:
    """One model's chunks in one store's namespace; made by :meth:`ChunkStore.space`.

    ``like`` are keys and values of the model's, of whatever tokens; None if they are not known.
    """

    store: ChunkStore
    name: str
    salt: bytes
    like: KV | None = None
    index: ChunkIndex = field(init=False)
    _refreshed: float = -REFRESH_SECONDS
    _passed_over: set[str] = field(default_factory=set)  # files of newer releases

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
            packed = entry.packed if entry and entry.chunk.same_text(chunk) else None
            store.touch(key)
        packed = packed or self._fetch(chunk)
        kv = None if packed is None else self._unpacked(chunk, packed)
        with store.lock:
            if kv is not None:
                store.counts.loads += 1
                return kv
            store.counts.misses += 1
            self.index.remove(chunk.chain)
        return None

    def _unpacked(self, chunk: Chunk, packed: Packed) -> KV | None:
        """Keys and values of ``chunk``; None, and gone from every tier, if they make no sense."""
        try:
            codec, store = packed[1].get("codec"), self.store
            if codec not in ((None, "gaac") if store.exact else (store.codec,)):
                raise CorruptDataError(f"a chunk in codec {codec!r}, which this store never writes")
            keys, values = unpack(*packed)
            if not (keys.is_floating_point() and values.is_floating_point()):
                raise CorruptDataError(f"keys and values of {keys.dtype} and {values.dtype}")
            if not keys.shape[:3] == values.shape[:3] == (*keys.shape[:2], chunk.tokens):
                raise CorruptDataError("keys and values are not those of its tokens")
            if self.like is not None and _shapes(keys, values) != _shapes(*self.like):
                raise CorruptDataError("keys and values are not of this model's shape")
        except UnsupportedLayoutError as error:  # another release's: left alone
            LOG.warning("A chunk was passed over: %s", error)
        except CorruptDataError as error:
            self._damaged(chunk.chain.hex(), self.store.tiers, error)
        else:
            return keys, values
        with self.store.lock:
            self.store.drop((self.name, chunk.chain))
        return None

    def _damaged(self, name: str, tiers: Iterable[Tier], error: Exception) -> None:
        LOG.warning("A damaged chunk was removed: %s", error)
        with self.store.lock:
            self.store.counts.damaged += 1
        for tier in tiers:
            self.store.attempt(tier, partial(tier.remove, self.name, name), None)

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
            written = False if known else self._write(chunk, packed)
            with store.lock:
                if store.admit(self, chunk, packed, norm) or written:
                    self.index.add(chunk)
                    store.counts.stored += 1
                    new += 0 if known else chunk.tokens
        return new

    def _write(self, chunk: Chunk, packed: Packed) -> bool:
        """Gives a chunk to every tier; whether one of them has it now."""
        data = to_bytes(chunk, packed) if self.store.tiers else b""

        def write(tier: Tier) -> bool:
            tier.write(self.name, chunk.chain.hex(), data)
            return True

        written = [self.store.attempt(t, partial(write, t), False) for t in self.store.tiers]
        return any(written)

    def pin(self, chunks: Iterable[Chunk], pinned: bool = True) -> None:
        """Keeps ``chunks`` from eviction, or no longer."""
        with self.store.lock:
            self.store.pin([(self.name, chunk.chain) for chunk in chunks], pinned)

    def pin_text(self, ids: Ids, position: int, pinned: bool) -> None:
        """Pins what is known of a text from its first token on."""
        prefix = self.match(ids, position).prefix
        self.pin([piece.chunk for piece in prefix.pieces] if prefix else [], pinned)

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
                if new and name not in self._passed_over:
                    self.read(tier, name, only_head=True)

    def names(self, tier: Tier) -> set[str]:
        """What a tier has of this space; nothing if it fails."""
        nothing: set[str] = set()
        return self.store.attempt(tier, partial(tier.names, self.name), nothing)

    def read(
        self, tier: Tier, name: str, only_head: bool = False, wanted: Chunk | None = None
    ) -> Packed | None:
        """A file's tensors; a damaged one is removed. With ``only_head`` it is only made known;
        one that does not hold the text ``wanted`` is none."""
        store = self.store
        try:
            chain = _chain_of(name)
            if chain is None:
                raise CorruptDataError("a file under a name that is no chunk's")
            packed = None
            if only_head:
                chunk = self._read_head(tier, name, chain)
            else:
                data = store.attempt(tier, lambda: tier.read(self.name, name), None)
                if data is None:
                    return None
                chunk, packed = from_bytes(self.salt, chain, data)
        except CorruptDataError as error:
            self._damaged(name, [tier], error)
            return None
        except UnsupportedLayoutError as error:  # another release's: left alone
            if name not in self._passed_over:
                LOG.warning("A chunk was passed over: %s", error)
            self._passed_over.add(name)
            return None
        if chunk is not None:
            with store.lock:
                self.index.add(chunk)
            if wanted is not None and not chunk.same_text(wanted):
                return None
        return packed

    def _read_head(self, tier: Tier, name: str, chain: bytes) -> Chunk | None:
        head = self.store.attempt(tier, lambda: tier.head(self.name, name, HEAD_BYTES), None)
        if head is not None and HEAD_BYTES <= len(head) < head_bytes(head) < 2**30:
            wanted = head_bytes(head)
            head = self.store.attempt(tier, lambda: tier.head(self.name, name, wanted), None)
        return None if head is None else read_chunk(self.salt, chain, head)

    def _fetch(self, chunk: Chunk) -> Packed | None:
        """A chunk from disk or remote, taken into memory again."""
        for tier in self.store.tiers:
            packed = self.read(tier, chunk.chain.hex(), wanted=chunk)
            if packed is not None:
                with self.store.lock:
                    self.store.admit(self, chunk, packed, None)
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


def _shapes(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Size, ...]:
    """Of no token: layers, heads and width."""
    return keys[:, :, :0].shape, values[:, :, :0].shape


def _norm_per_token(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean l2 norm of a token's keys and values, float32 ``[]`` on their device: the same scale
    for every length, and nobody waits for it here."""
    norms = [torch.linalg.vector_norm(states, dtype=torch.float32) for states in (keys, values)]
    norm: torch.Tensor = torch.stack(norms).norm() / max(keys.shape[2], 1) ** 0.5
    return norm
