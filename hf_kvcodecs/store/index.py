"""Chunks of one model and namespace by name, by parent and by what they contain."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from .chunk import Chunk, Match, Piece, Span
from .hashing import (
    PROBE_TOKENS,
    Ids,
    chain_key,
    common_prefix,
    common_suffix,
    probe_hashes,
    root_key,
)

MIN_MOVED_TOKENS = 64  # shorter finds cost as much to repair as to compute
MAX_CANDIDATES = 16  # places in chunks, the newest, that are compared for one hash


class ChunkIndex:
    """Finds what a prompt shares with the chunks added; not thread-safe, the store locks."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, list[Chunk]] = {}
        self._probes: dict[int, list[tuple[Chunk, int]]] = {}  # hash -> chunk, offset in it
        self._contents: dict[bytes, int] = {}

    def add(self, chunk: Chunk) -> None:
        """Makes ``chunk`` findable; one of the same name stays as it is."""
        if chunk.chain in self.chunks:
            return
        self.chunks[chunk.chain] = chunk
        self._children.setdefault(chunk.parent, []).append(chunk)
        for turn, probe in enumerate(chunk.probes):
            self._probes.setdefault(probe, []).append((chunk, turn * PROBE_TOKENS))
        self._contents[chunk.content] = self.copies(chunk) + 1

    def remove(self, chain: bytes) -> None:
        """Forgets a chunk, if it is known."""
        chunk = self.chunks.pop(chain, None)
        if chunk is None:
            return
        _discard(self._children, chunk.parent, chunk)
        for turn, probe in enumerate(chunk.probes):
            _discard(self._probes, probe, (chunk, turn * PROBE_TOKENS))
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
        """Spans of at least ``MIN_MOVED_TOKENS`` from ``at`` on, whatever offset they begin at,
        here and in their chunks."""
        probes = probe_hashes(ids).tolist()
        floor = place = at
        tried: set[tuple[bytes, int]] = set()  # chunks by where they would begin here
        while place < len(probes):
            if probes[place] not in self._probes:
                place += 1
                continue
            # Of two that begin here, the longer one may share its first hash a little later.
            stop = min(place + 2 * PROBE_TOKENS, len(probes))
            run = self._longest(probes[place:stop], ids, place, floor, tried)
            span = Span(pieces=tuple(run)) if run else None
            if span is not None and span.tokens >= MIN_MOVED_TOKENS:
                floor = place = span.end
                tried.clear()
                yield span
            else:
                place = stop

    def _longest(
        self, probes: list[int], ids: Ids, at: int, floor: int, tried: set[tuple[bytes, int]]
    ) -> list[Piece]:
        """The longest run through any of the places that ``probes``, from ``at`` on, propose."""
        best: list[Piece] = []
        for place, probe in enumerate(probes, at):
            for chunk, offset in self._probes.get(probe, ())[-MAX_CANDIDATES:]:
                if (chunk.chain, place - offset) in tried:
                    continue
                tried.add((chunk.chain, place - offset))
                run = self._run(chunk, offset, ids, place, floor)
                if run and (not best or _tokens(run) > _tokens(best)):
                    best = run
        return best

    def _run(self, chunk: Chunk, offset: int, ids: Ids, at: int, floor: int) -> list[Piece]:
        """What stands around ``offset`` of ``chunk`` and around ``at`` of ``ids`` (not before
        ``floor``) alike, in the chunks before and behind it too."""
        stop = offset + common_prefix(chunk.ids[offset:], ids[at:])
        if stop == offset:
            return []
        run: list[Piece] = []
        head: Chunk | None = chunk
        end = stop
        while head is not None:
            shared = common_suffix(head.ids[:offset], ids[floor:at])
            start, at = offset - shared, at - shared
            if start < end:
                run.insert(0, Piece(chunk=head, start=start, stop=end, at=at))
            if start or at == floor:
                break
            head = self.chunks.get(head.parent)
            offset = end = head.tokens if head else 0
        last = run[-1]
        return [*run, *self._follow(piece_key(self.salt, last), ids, last.end)]

    def _child(self, parent: bytes, ids: Ids, at: int) -> Piece | None:
        """The chunk behind ``parent`` that shares most tokens with ``ids`` from ``at`` on."""
        rest, best = ids[at:], None
        for chunk in self._children.get(parent, ()):
            stop = common_prefix(chunk.ids, rest)
            if stop and (best is None or stop > best.stop):
                best = Piece(chunk=chunk, start=0, stop=stop, at=at)
        return best


def piece_key(salt: bytes, piece: Piece) -> bytes:
    """The name of everything up to the end of a piece."""
    if piece.stop == piece.chunk.tokens:
        return piece.chunk.chain
    return chain_key(salt, piece.chunk.parent, piece.chunk.ids[: piece.stop])


def _tokens(run: list[Piece]) -> int:
    return run[-1].end - run[0].at


def _discard(table: dict, key: object, entry: object) -> None:  # type: ignore[type-arg]
    entries = table[key]
    entries.remove(entry)
    if not entries:
        del table[key]
