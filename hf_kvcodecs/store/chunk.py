"""A chunk: some tokens, where a prefill saw them, and the names it is found by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .hashing import PROBE_TOKENS, Ids, chain_key, content_key, probe_hashes

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values [layers, kv_heads, tokens, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """What is known of a chunk beside its keys and values.

    Args:
        chain: its name, the hash of its tokens and of everything before them.
        parent: the chain of the chunk before it, or the root of its text.
        content: the hash of its tokens alone.
        ids: token ids int64 ``[tokens]``.
        position: the position its first token had.
    """

    chain: bytes
    parent: bytes
    content: bytes
    ids: Ids
    position: int

    @classmethod
    def make(cls, salt: bytes, parent: bytes, ids: Ids, position: int) -> Chunk:
        """A chunk with its names."""
        ids = ids.copy()
        ids.flags.writeable = False
        return cls(
            chain=chain_key(salt, parent, ids),
            parent=parent,
            content=content_key(salt, ids),
            ids=ids,
            position=position,
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def same_text(self, other: Chunk) -> bool:
        """Whether both are the same tokens at the same place: equal names are not believed."""
        return other is self or (
            (self.parent, self.position) == (other.parent, other.position)
            and np.array_equal(self.ids, other.ids)
        )

    @property
    def probes(self) -> list[int]:
        """The rolling hashes at every ``PROBE_TOKENS``-th of its offsets: any text that shares
        twice as many tokens with it shares one of them. None where it is shorter."""
        hashes: list[int] = probe_hashes(self.ids)[::PROBE_TOKENS].tolist()
        return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens ``start .. stop`` of ``chunk``, which stand at offset ``at`` of a prompt."""

    chunk: Chunk
    start: int
    stop: int
    at: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The offset in the prompt behind it."""
        return self.at + self.tokens

    @property
    def position(self) -> int:
        """The position at which its first token's keys were computed."""
        return self.chunk.position + self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring pieces of one prefill that are neighbours in the prompt too: no seam inside."""

    pieces: tuple[Piece, ...]

    @property
    def at(self) -> int:
        return self.pieces[0].at

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def tokens(self) -> int:
        return self.end - self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a store knows of a prompt: an exact prefix, and spans found elsewhere, in order."""

    prefix: Span | None
    moved: tuple[Span, ...]

    @property
    def exact_tokens(self) -> int:
        return self.prefix.tokens if self.prefix else 0
