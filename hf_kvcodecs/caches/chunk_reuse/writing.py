"""What of a row has been written to the store, and what is to be written next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...store import Chunk, ChunkSpace
from ...store.chunk import KV
from ...store.chunkers import Strengths
from ...store.hashing import Ids, branch_key, root_key
from ...store.index import MIN_MOVED_TOKENS, piece_key
from .assembly import RowMatch

Slice = Callable[[int, int], KV]  # keys and values [layers, kv_heads, stop - start, head_dim]


@dataclass(slots=True)
class RowText:
    """The tokens of one row of the batch, prompt and reply.

    Args:
        ids: token ids so far.
        pad: columns of left padding before them.
        position: the position of the first one.
        parent: the chain of everything before ``written``.
        written: tokens that need no more writing.
    """

    ids: Ids
    pad: int
    position: int
    parent: bytes
    written: int = 0

    @classmethod
    def begin(cls, salt: bytes, ids: Ids, pad: int, position: int) -> RowText:
        return cls(ids=ids, pad=pad, position=position, parent=root_key(salt, position))

    def copy(self) -> RowText:
        return RowText(self.ids, self.pad, self.position, self.parent, self.written)

    def write(
        self, space: ChunkSpace, states: Slice, ends: Strengths, stop: int | None = None
    ) -> int:
        """Puts what is new into ``space``, up to ``stop``; how many tokens that were."""
        stop = len(self.ids) if stop is None else stop
        return space.put(self._chunks(space, states, ends, stop))

    def _chunks(
        self, space: ChunkSpace, states: Slice, ends: Strengths, stop: int
    ) -> Iterator[tuple[Chunk, Callable[[], KV]]]:
        ids = self.ids[self.written : stop]
        for cut in space.store.chunker.cuts(ids, ends[self.written : stop]):
            start = self.written
            cut += stop - len(ids)
            chunk = Chunk.make(space.salt, self.parent, self.ids[start:cut], self.position + start)
            yield chunk, partial(states, start, cut)
            self.parent, self.written = chunk.chain, cut

    def write_prompt(
        self, space: ChunkSpace, match: RowMatch, states: Slice, ends: Strengths
    ) -> int:
        """Puts what a prefill computed: what is behind the exact prefix under its true name, what
        is behind moved text under names of their own, since its context was approximate."""
        if match.known:
            last = match.known[-1]
            self.parent, self.written = piece_key(space.salt, last), last.end
        if not match.moved:
            return self.write(space, states, ends)
        total = self.write(space, states, ends, match.moved[0].at)
        for begin, end in _gaps(match):
            self.parent, self.written = branch_key(space.salt, self.parent, os.urandom(16)), begin
            if end - begin >= MIN_MOVED_TOKENS:  # shorter ones would never be found
                total += self.write(space, states, ends, end)
        return total


def _gaps(match: RowMatch) -> list[tuple[int, int]]:
    """What lies behind each moved span, up to the next or the end."""
    starts = [span.end for span in match.moved]
    return list(zip(starts, [*(span.at for span in match.moved[1:]), match.tokens], strict=True))


def slice_states(layers: list[object], row: int, pad: int) -> Slice:
    """A reader of one row's tokens from the layers of a cache."""

    def states(start: int, stop: int) -> KV:
        keys, values = (
            torch.stack([getattr(la, name)[row, :, pad + start : pad + stop] for la in layers])
            for name in ("keys", "values")
        )
        return keys.detach(), values.detach()

    return states


def append_ids(ids: Ids, new: Ids) -> Ids:
    """``ids`` with ``new`` behind them."""
    return np.concatenate([ids, new.astype(np.int64)])
