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
    """Each layer's keys and values ``[batch, kv_heads, columns, head_dim]`` with holes, and what
    they are made of."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
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
    """Keys and values, filled where something is known; padding is zero."""
    batch = [
        _groups(match, loaded, position, rotation, device)
        for match, position in zip(rows, prompt.positions, strict=True)
    ]
    made: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    # Layer by layer: memory of a layer's size is at hand, that of all layers is not.
    for layer, like in enumerate(zip(*next(iter(loaded.values())), strict=True)):
        begun = _beginning(batch, prompt, layer, device)
        for states, one, start in zip(made, like, begun or (None, None), strict=True):
            shape = (len(rows), one.shape[0], prompt.columns, one.shape[2])
            new = torch.empty(shape, dtype=one.dtype, device=device) if start is None else start
            states.append(new)
        keys, values = made[0][-1], made[1][-1]
        for row, (groups, pad) in enumerate(zip(batch, prompt.pads, strict=True)):
            keys[row, :, :pad], values[row, :, :pad] = 0, 0
            for group in groups[1:] if begun else groups:
                place = slice(pad + group.at, pad + group.end)
                values[row, :, place] = _joined(group.values, layer).to(device)
                stored = _joined(group.keys, layer).to(device)
                if group.angles and rotation.layers[layer]:
                    rotation.turn(stored, *group.angles, keys[row, :, place])
                else:
                    keys[row, :, place] = stored
    return Assembly(keys=made[0], values=made[1], rows=tuple(rows))


def _beginning(
    batch: list[list[_Group]], prompt: Prompt, layer: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of one layer that begin with a lone row's exact prefix, copied once; the
    rest is not filled. None where a batch does not begin like that."""
    if len(batch) > 1 or prompt.pads[0] or not batch[0]:
        return None
    group = batch[0][0]
    if group.at or group.angles or group.keys[0][layer].device != device:
        return None
    keys, values = (
        torch.cat([*(p[layer] for p in pieces), rest], 1)[None]
        for pieces in (group.keys, group.values)
        for rest in [pieces[0][layer].new_empty(_rest(pieces, layer, prompt.columns - group.end))]
    )
    return keys, values


def _rest(pieces: list[tuple[torch.Tensor, ...]], layer: int, tokens: int) -> tuple[int, int, int]:
    kv_heads, _, head_dim = pieces[0][layer].shape
    return kv_heads, tokens, head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Neighbouring pieces that move alike: each one's keys and values layer by layer
    ``[kv_heads, tokens, head_dim]``, and the angles by which its keys turn, if they do."""

    at: int
    end: int
    keys: list[tuple[torch.Tensor, ...]]
    values: list[tuple[torch.Tensor, ...]]
    angles: tuple[torch.Tensor, torch.Tensor] | None


def _groups(
    match: RowMatch,
    loaded: dict[Chunk, KV],
    position: int,
    rotation: Rotation,
    device: torch.device,
) -> list[_Group]:
    """What is known of a row whose first token has ``position``."""
    runs: list[list[Piece]] = []
    for piece in (*match.prefix, *(piece for span in match.moved for piece in span.pieces)):
        last = runs[-1][-1] if runs else None
        if last and (piece.at, piece.position) == (last.end, last.position + last.tokens):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    moving = [run for run in runs if position + run[0].at != run[0].position]
    angles = _angles(moving, position, rotation, device)
    groups = []
    for run in runs:
        keys, values = (
            [loaded[p.chunk][which][:, :, p.start : p.stop].unbind(0) for p in run]
            for which in (0, 1)
        )
        turned = next(angles) if run in moving else None
        groups.append(
            _Group(at=run[0].at, end=run[-1].end, keys=keys, values=values, angles=turned)
        )
    return groups


def _joined(pieces: list[tuple[torch.Tensor, ...]], layer: int) -> torch.Tensor:
    return pieces[0][layer] if len(pieces) == 1 else torch.cat([p[layer] for p in pieces], 1)


def _angles(
    runs: list[list[Piece]], position: int, rotation: Rotation, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin for each run; computed together, one transfer for all."""
    if not runs:
        return
    lengths = [run[-1].end - run[0].at for run in runs]
    old = [torch.arange(n) + run[0].position for run, n in zip(runs, lengths, strict=True)]
    new = [torch.arange(n) + position + run[0].at for run, n in zip(runs, lengths, strict=True)]
    cos, sin = rotation.angles(torch.cat(old), torch.cat(new), device)
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
