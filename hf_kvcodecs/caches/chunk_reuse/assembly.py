"""A prompt's keys and values from the pieces that a store knows, moved to where they stand now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ...store import Chunk, ChunkSpace, Match, Piece, Span
from ...store.chunk import KV
from .prompt import Prompt
from .rotation import Rotation

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMatch:
    """What is reused of one row: loaded, and short of the tokens whose logits are wanted.

    Args:
        prefix: exact pieces from the row's first token on.
        moved: spans to be repaired, offsets within the row.
        tokens: of the row.
        known: as ``prefix``, with the tokens whose logits are wanted: what need not be written.
    """

    prefix: tuple[Piece, ...]
    moved: tuple[Span, ...]
    tokens: int
    known: tuple[Piece, ...] = ()

    @property
    def exact_tokens(self) -> int:
        return self.prefix[-1].end if self.prefix else 0

    @property
    def moved_tokens(self) -> int:
        return sum(span.tokens for span in self.moved)

    def missing(self) -> Flags:
        """For each token of the row whether nothing is known of it."""
        missing = np.ones(self.tokens, bool)
        missing[: self.exact_tokens] = False
        for span in self.moved:
            missing[span.at : span.end] = False
        return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Keys and values ``[layers, batch, kv_heads, columns, head_dim]`` with holes, and what they
    are made of."""

    keys: torch.Tensor
    values: torch.Tensor
    rows: tuple[RowMatch, ...]


def find(
    prompt: Prompt, space: ChunkSpace, *, moves: bool
) -> tuple[list[RowMatch], dict[Chunk, KV]]:
    """What ``space`` has of each row, and the keys and values of the chunks involved."""
    loaded: dict[Chunk, KV] = {}
    rows = []
    for ids, position in zip(prompt.rows, prompt.positions, strict=True):
        whole = space.match(ids, position)
        match = _clip(whole, len(ids) - prompt.keep)
        prefix = tuple(_loaded(match.prefix.pieces if match.prefix else (), space, loaded))
        moved = []
        for span in match.moved if moves else ():
            if pieces := tuple(_loaded(span.pieces, space, loaded)):
                moved.append(Span(pieces=pieces))
        known = whole.prefix.pieces[: len(prefix)] if whole.prefix else ()
        rows.append(RowMatch(prefix=prefix, moved=tuple(moved), tokens=len(ids), known=known))
    return rows, loaded


def assemble(
    prompt: Prompt,
    rows: list[RowMatch],
    loaded: dict[Chunk, KV],
    rotation: Rotation,
    device: torch.device,
) -> Assembly:
    """One tensor for keys and one for values, filled where something is known; padding is zero."""
    like = next(iter(loaded.values()))
    keys, values = (
        torch.empty(
            (len(t), len(rows), t.shape[1], prompt.columns, t.shape[3]),
            dtype=t.dtype,
            device=device,
        )
        for t in like
    )
    for row, (match, pad) in enumerate(zip(rows, prompt.pads, strict=True)):
        keys[:, row, :, :pad], values[:, row, :, :pad] = 0, 0
        pieces = [*match.prefix, *(piece for span in match.moved for piece in span.pieces)]
        shifts = [prompt.positions[row] + piece.at - piece.position for piece in pieces]
        angles = _angles(pieces, shifts, rotation, device)
        for piece, shift in zip(pieces, shifts, strict=True):
            stored_keys, stored_values = (
                states[:, :, piece.start : piece.stop].to(device) for states in loaded[piece.chunk]
            )
            place = slice(pad + piece.at, pad + piece.end)
            values[:, row, :, place] = stored_values
            if shift:
                cos, sin = next(angles)
                rotation.turn(stored_keys, cos, sin, keys[:, row, :, place])
            else:
                keys[:, row, :, place] = stored_keys
    return Assembly(keys=keys, values=values, rows=tuple(rows))


def _angles(
    pieces: list[Piece], shifts: list[int], rotation: Rotation, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin for each piece that moves; computed together, one transfer for all."""
    moving = [(piece, shift) for piece, shift in zip(pieces, shifts, strict=True) if shift]
    if not moving:
        return
    old = [torch.arange(p.position, p.position + p.stop - p.start) for p, _ in moving]
    new = [positions + shift for positions, (_, shift) in zip(old, moving, strict=True)]
    cos, sin = rotation.angles(torch.cat(old), torch.cat(new), device)
    lengths = [len(positions) for positions in old]
    yield from zip(cos.split(lengths), sin.split(lengths), strict=True)


def _loaded(
    pieces: tuple[Piece, ...], space: ChunkSpace, loaded: dict[Chunk, KV]
) -> Iterator[Piece]:
    """``pieces`` up to the first that no tier has any more."""
    for piece in pieces:
        if piece.chunk not in loaded:
            states = space.load(piece.chunk)
            if states is None:
                return
            loaded[piece.chunk] = states
        yield piece


def _clip(match: Match, tokens: int) -> Match:
    """``match`` without what lies beyond the first ``tokens`` tokens."""
    prefix = _clip_span(match.prefix, tokens) if match.prefix else None
    spans = (_clip_span(span, tokens) for span in match.moved)
    return Match(prefix=prefix, moved=tuple(span for span in spans if span))


def _clip_span(span: Span, tokens: int) -> Span | None:
    pieces = tuple(
        replace(p, stop=min(p.stop, p.start + tokens - p.at)) for p in span.pieces if p.at < tokens
    )
    return Span(pieces=pieces) if pieces else None
