"""What a forward call brings, and whether its beginning may be taken from a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...store.hashing import Ids

KNOWN = frozenset(
    "input_ids attention_mask position_ids cache past_key_values use_cache logits_to_keep "
    "return_dict cache_position".split()
)
# Outputs for every token: those of reused ones would be missing.
PER_TOKEN_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens of one forward call, row by row.

    Args:
        rows: each row's token ids, padding left out.
        pads: each row's columns of left padding.
        positions: the position of each row's first token.
        columns: columns of the batch.
        keep: how many of the last columns need logits.
    """

    rows: tuple[Ids, ...]
    pads: tuple[int, ...]
    positions: tuple[int, ...]
    columns: int
    keep: int


class NoReuse(Exception):  # no error: the model runs as without a store
    """Why a call runs without a store."""


def read_prompt(kwargs: Mapping[str, Any], config: Any, *, last_logits_only: bool) -> Prompt:
    """The prompt of a first forward call with the arguments ``kwargs`` of a model with ``config``.

    Raises:
        NoReuse: something other than token ids decides the keys and values, or the caller wants
            more than the last logits.
    """
    ids, mask = _ids(kwargs), kwargs.get("attention_mask")
    for name in PER_TOKEN_OUTPUTS:
        asked = kwargs.get(name)
        if getattr(config, name, False) if asked is None else asked:
            raise NoReuse(f"{name} asks for outputs of every token")
    keep = kwargs.get("logits_to_keep", 0)
    if not isinstance(keep, int) or (keep < 1 and not last_logits_only):
        raise NoReuse("logits of every token are asked for; pass logits_to_keep=1, or use generate")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == ids.shape):
        raise NoReuse("attention_mask is not one number for each token")
    host = ids.detach().cpu().numpy()
    pads = _pads(mask) if mask is not None else np.zeros(len(host), np.int64)
    positions = _first_positions(kwargs.get("position_ids"), ids.shape, pads)
    return Prompt(
        rows=tuple(row[pad:] for row, pad in zip(host, pads, strict=True)),
        pads=tuple(int(pad) for pad in pads),
        positions=tuple(int(position) for position in positions),
        columns=ids.shape[1],
        keep=max(keep, 1),
    )


def _ids(kwargs: Mapping[str, Any]) -> torch.Tensor:
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
        raise NoReuse("the model is not fed token ids (inputs_embeds?)")
    for name, value in kwargs.items():
        if name not in KNOWN and isinstance(value, torch.Tensor | list | tuple):
            raise NoReuse(f"the model is fed {name!r} too, so that token ids do not say it all")
    return ids


def read_on(
    kwargs: Mapping[str, Any], held: int, pads: Sequence[int], positions: Sequence[int]
) -> tuple[Ids, ...]:
    """The tokens of a later forward call, row by row.

    Args:
        kwargs: the call's arguments.
        held: columns that the cache holds.
        pads: each row's columns of left padding.
        positions: the position of each row's first token behind them.

    Raises:
        NoReuse: they do not follow what is held, or see it otherwise than it was seen so far.
    """
    ids, mask, given = _ids(kwargs), kwargs.get("attention_mask"), kwargs.get("position_ids")
    (batch, new), columns = ids.shape, held + ids.shape[1]
    before, first = np.array(pads), np.array(positions) + held - np.array(pads)
    parts = [ids]
    if batch != len(pads):
        raise NoReuse("the batch has another number of rows than before")
    if mask is not None:
        if not (isinstance(mask, torch.Tensor) and mask.shape == (batch, columns)):
            raise NoReuse("attention_mask is not one number for each token")
        present = mask != 0  # two numbers of each row say it all
        parts += [present.int().argmax(1, keepdim=True), present.sum(1, keepdim=True)]
    if given is not None:
        if not (isinstance(given, torch.Tensor) and given.dim() == 2):
            raise NoReuse("position_ids has more than one number for each token")
        parts.append(given.expand(ids.shape))
    host = torch.cat([part.to(ids) for part in parts], 1).detach().cpu().numpy()  # one transfer
    if mask is not None:
        hidden = (host[:, new] != before) | (host[:, new + 1] != columns - before)
    else:
        hidden = before != 0
    if hidden.any():
        raise NoReuse("attention_mask hides other tokens than padding on the left")
    if given is not None:
        jumps = (host[:, -new:] != first[:, None] + np.arange(new)).any()
    else:  # what models do then: columns are positions
        jumps = (first != held).any()
    if jumps:
        raise NoReuse("position_ids do not go on from those so far one by one")
    return tuple(host[:, :new])


def _pads(mask: torch.Tensor) -> Ids:
    """Columns of left padding of each row."""
    present = mask.detach().cpu().numpy() != 0
    pads: Ids = present.argmax(1)
    if not present[:, -1].all() or (present.sum(1) != present.shape[1] - pads).any():
        raise NoReuse("attention_mask hides more than padding on the left")
    return pads


def _first_positions(position_ids: Any, shape: torch.Size, pads: Ids) -> Ids:
    """The position of each row's first token; the others must follow it one by one."""
    if position_ids is None:
        return pads  # what models do then: columns are positions
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2:
        raise NoReuse("position_ids has more than one number for each token")
    given = position_ids.detach().cpu().expand(shape).numpy()
    first: Ids = given[np.arange(len(given)), pads]
    expected = first[:, None] + np.arange(shape[1])[None] - pads[:, None]
    if (np.where(np.arange(shape[1])[None] >= pads[:, None], given, expected) != expected).any():
        raise NoReuse("position_ids do not count up by one")
    return first
