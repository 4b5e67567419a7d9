"""What a forward call brings, and whether its beginning may be taken from a store."""

from __future__ import annotations

from collections.abc import Mapping
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


def read_prompt(kwargs: Mapping[str, Any], *, last_logits_only: bool) -> Prompt:
    """The prompt of a first forward call with the arguments ``kwargs``.

    Raises:
        NoReuse: something other than token ids decides the keys and values, or the caller wants
            more than the last logits.
    """
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
        raise NoReuse("the model is not fed token ids (inputs_embeds?)")
    for name, value in kwargs.items():
        if name not in KNOWN and isinstance(value, torch.Tensor | list | tuple):
            raise NoReuse(f"the model is fed {name!r} too, so that token ids do not say it all")
        if name in PER_TOKEN_OUTPUTS and value:
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
