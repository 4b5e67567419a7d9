"""Chunks of one model and namespace by name, by parent and by their first tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from .chunk import Chunk, Match, Piece, Span
from .hashing import Ids, chain_key, common_prefix, common_suffix, probe_hashes, root_key

MIN_MOVED_TOKENS = 64  # shorter finds cost as much to repair as to compute


class ChunkIndex:
    """Finds what a prompt shares with the chunks added; not thread-safe, the store locks."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, list[Chunk]] = {}
        self._probes: dict[int, list[Chunk]] = {}
        self._contents: dict[bytes, int] = {}

    def add(self, chunk: Chunk) -> None:
        """Makes ``chunk`` findable; one of the same name stays as it is."""
        if chunk.chain in self.chunks:
            return
        self.chunks[chunk.chain] = chunk
        self._children.setdefault(chunk.parent, []).append(chunk)
        if (probe := chunk.probe) is not None:
            self._probes.setdefault(probe, []).append(chunk)
        self._contents[chunk.content] = self.copies(chunk) + 1

    def remove(self, chain: bytes) -> None:
        """Forgets a chunk, if it is known."""
        chunk = self.chunks.pop(chain, None)
        if chunk is None:
            return
        _discard(self._children, chunk.parent, chunk)
        if (probe := chunk.probe) is not None:
            _discard(self._probes, probe, chunk)
        self._contents[chunk.content] -= 1
        if not self._contents[chunk.content]:
            del self._contents[chunk.content]

    def copies(self, chunk: Chunk) -> int:
        """How many chunks hold the same tokens, behind different texts."""
        return self._contents.get(chunk.content, 0)

    def match(self, ids: Ids, position: int) -> Match:
        """What of a prompt is known.

        Args:
            ids: the prompt's token ids ``[tokens]``.
            position: the position of its first token.

        Every token of every piece was compared; hashes only propose.
        """
        prefix = self._prefix(ids, position)
        moved = tuple(self._moved(ids, prefix[-1].end if prefix else 0))
        return Match(prefix=Span(pieces=tuple(prefix)) if prefix else None, moved=moved)

    def _prefix(self, ids: Ids, position: int) -> list[Piece]:
        root = root_key(self.salt, position)
        follow = self._follow(root, ids, 0)
        return list(takewhile(lambda piece: piece.position == position + piece.at, follow))

    def _follow(self, parent: bytes, ids: Ids, at: int) -> Iterator[Piece]:
        """What stands behind ``parent`` and in ``ids`` from ``at`` on, as far as they agree.

        A text may leave a chunk in its middle: what was stored behind its first tokens has those
        tokens' name for a parent, like a chunk that ends there.
        """
        while (piece := self._child(parent, ids, at)) is not None:
            yield piece
            parent, at = piece_key(self.salt, piece), piece.end

    def _moved(self, ids: Ids, at: int) -> Iterator[Span]:
        floor = at
        probes = probe_hashes(ids)
        if not self._probes or at >= len(probes):
            return
        known = np.fromiter(self._probes, np.uint64, len(self._probes))
        for place in np.flatnonzero(np.isin(probes[at:], known)) + at:
            if place < floor:
                continue
            runs = (self._run(chunk, ids, int(place)) for chunk in self._probes[int(probes[place])])
            run = max(runs, key=lambda pieces: pieces[-1].end if pieces else -1)
            if not run:
                continue
            run = self._before(run[0], ids, floor) + run
            span = Span(pieces=tuple(run))
            if span.tokens >= MIN_MOVED_TOKENS:
                floor = span.end
                yield span

    def _run(self, chunk: Chunk, ids: Ids, at: int) -> list[Piece]:
        """``chunk`` at offset ``at`` and what follows it both there and here."""
        stop = common_prefix(chunk.ids, ids[at:])
        if not stop:
            return []
        first = Piece(chunk=chunk, start=0, stop=stop, at=at)
        return [first, *self._follow(piece_key(self.salt, first), ids, first.end)]

    def _child(self, parent: bytes, ids: Ids, at: int) -> Piece | None:
        """The chunk behind ``parent`` that shares most tokens with ``ids`` from ``at`` on."""
        rest, best = ids[at:], None
        for chunk in self._children.get(parent, ()):
            stop = common_prefix(chunk.ids, rest)
            if stop and (best is None or stop > best.stop):
                best = Piece(chunk=chunk, start=0, stop=stop, at=at)
        return best

    def _before(self, piece: Piece, ids: Ids, floor: int) -> list[Piece]:
        """What of the chunk before ``piece`` stands before it in the prompt too."""
        parent = self.chunks.get(piece.chunk.parent)
        if parent is None:
            return []
        shared = common_suffix(parent.ids, ids[floor : piece.at])
        if not shared:
            return []
        return [
            Piece(
                chunk=parent,
                start=parent.tokens - shared,
                stop=parent.tokens,
                at=piece.at - shared,
            )
        ]


def piece_key(salt: bytes, piece: Piece) -> bytes:
    """The name of everything up to the end of a piece that begins where its chunk does."""
    if piece.stop == piece.chunk.tokens:
        return piece.chunk.chain
    return chain_key(salt, piece.chunk.parent, piece.chunk.ids[: piece.stop])


def _discard(table: dict, key: object, chunk: Chunk) -> None:  # type: ignore[type-arg]
    chunks = table[key]
    chunks.remove(chunk)
    if not chunks:
        del table[key]
