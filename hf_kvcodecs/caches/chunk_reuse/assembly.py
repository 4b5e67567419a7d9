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
GROUP_BYTES = 256 << 20  # keys that are turned at once on a GPU; several times that is needed


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
        groups = list(_groups(pieces, prompt.positions[row], _token_bytes(like), device))
        angles = _angles(groups, rotation, device)
        for group in groups:
            stored_keys, stored_values = (
                _joined([loaded[p.chunk][which][:, :, p.start : p.stop] for p in group.pieces])
                for which in (0, 1)
            )
            place = slice(pad + group.pieces[0].at, pad + group.pieces[-1].end)
            values[:, row, :, place] = stored_values.to(device)
            if group.shift:
                cos, sin = next(angles)
                rotation.turn(stored_keys.to(device), cos, sin, keys[:, row, :, place])
            else:
                keys[:, row, :, place] = stored_keys.to(device)
    return Assembly(keys=keys, values=values, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Neighbouring pieces that move by the same ``shift``, handled at once."""

    pieces: list[Piece]
    shift: int

    def positions(self) -> torch.Tensor:
        """Those at which its keys were computed."""
        return torch.cat([torch.arange(p.position, p.position + p.tokens) for p in self.pieces])


def _groups(
    pieces: list[Piece], position: int, token_bytes: int, device: torch.device
) -> Iterator[_Group]:
    """``pieces`` of a row whose first token has ``position``, in order."""
    # A GPU starts few large operations sooner than many small ones; a CPU's cache wants small ones.
    bound = 0 if device.type == "cpu" else GROUP_BYTES // max(token_bytes, 1)
    group: list[Piece] = []
    for piece in pieces:
        if group and not (
            piece.at == group[-1].end
            and piece.at - piece.position == group[0].at - group[0].position
            and piece.end - group[0].at <= bound
        ):
            yield _Group(pieces=group, shift=position + group[0].at - group[0].position)
            group = []
        group = [*group, piece]
    if group:
        yield _Group(pieces=group, shift=position + group[0].at - group[0].position)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _token_bytes(kv: KV) -> int:
    return kv[0].nbytes // max(kv[0].shape[2], 1)


def _angles(
    groups: list[_Group], rotation: Rotation, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin for each group that moves; computed together, one transfer for all."""
    moving = [group for group in groups if group.shift]
    if not moving:
        return
    old = [group.positions() for group in moving]
    new = [positions + group.shift for positions, group in zip(old, moving, strict=True)]
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
