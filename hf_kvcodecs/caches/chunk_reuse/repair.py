"""Which rows of moved text are recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Cache

from ..compat import CACHE_ARGUMENT
from .assembly import Assembly, Flags, RowMatch
from .layer import ScatterLayer
from .prompt import Prompt
from .rows import RowPlan, layout

HEAD_TOKENS = 16  # the first rows of moved text depend most on what now stands before them
TAIL_TOKENS = 8  # the last ones are what the text behind attends to most
SINK_RATIO = 0.01  # of the rows, those with the smallest keys: twice as many help no further
MIN_SINKS = 5  # of a span, however short
SAMPLED_LAYERS = 8  # layers whose keys tell which those are
PROBED_LAYER = 1  # the lowest whose values know the context: those of layer 0 know the token alone
REPAIRS = ("cacheblend", "selective", "none", "exact")


def selected_rows(match: RowMatch, keys: list[torch.Tensor], row: int, pad: int) -> Flags:
    """Rows that matter most by where they stand and how they are attended to, without a probe.

    The first rows of every moved span (EPIC, arXiv 2410.15332), its last ones, and those with the
    smallest keys: tokens that gather attention whatever the query is (line ends, separators), so
    that what they say of their old context reaches everything behind them.

    Args:
        match: what is reused of the row.
        keys: each layer's ``[batch, kv_heads, columns, head_dim]``.
        row: of the batch.
        pad: its columns of left padding.
    """
    chosen = np.zeros(match.tokens, bool)
    for span in match.moved:
        chosen[span.at : min(span.at + HEAD_TOKENS, span.end)] = True
        chosen[max(span.end - TAIL_TOKENS, span.at) : span.end] = True
        if count := min(max(round(SINK_RATIO * span.tokens), MIN_SINKS), span.tokens):
            place = slice(pad + span.at, pad + span.end)
            sizes = torch.zeros(span.tokens, device=keys[0].device)
            for layer in keys[:: max(len(keys) // SAMPLED_LAYERS, 1)]:
                sizes += layer[row, :, place].float().square().sum((0, 2))
            smallest = sizes.topk(count, largest=False).indices
            chosen[span.at + smallest.cpu().numpy()] = True
    return chosen


def deviating_rows(match: RowMatch, deviation: np.ndarray[Any, Any], ratio: float) -> Flags:
    """The ``ratio`` of all moved rows whose fresh states stand farthest from the stored ones."""
    moved = ~match.missing()
    moved[: match.exact_tokens] = False
    chosen = np.zeros(match.tokens, bool)
    count = round(ratio * int(moved.sum()))
    if count:
        order = np.argsort(np.where(moved, -deviation, np.inf), kind="stable")
        chosen[order[:count]] = True
    return chosen


class _ProbeDone(Exception):  # ends a forward call early, nothing went wrong
    pass


class _ProbeLayer(ScatterLayer):
    """Notes the states that it is given, and ends the forward pass."""

    fresh: tuple[torch.Tensor, torch.Tensor]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        self.fresh = key_states, value_states
        raise _ProbeDone


def probe(
    call: Callable[..., Any],
    prompt: Prompt,
    assembly: Assembly,
    ids: torch.Tensor,
    needs_float_mask: bool,
) -> list[np.ndarray[Any, Any]]:
    """For each row how far fresh values of ``PROBED_LAYER`` stand from the stored ones:
    ``[tokens]``, 0 where nothing is stored.

    Runs the model over everything but the exact prefix, up to that layer and no further.
    """
    wanted = []
    for match in assembly.rows:
        flags = np.ones(match.tokens, bool)
        flags[: match.exact_tokens] = False
        wanted.append(flags)
    plan = layout(prompt, wanted, ids, needs_float_mask, assembly.keys[0].dtype)
    layers: list[Any] = [*(ScatterLayer() for _ in range(PROBED_LAYER)), _ProbeLayer()]
    for idx, layer in enumerate(layers):
        # Copies: nothing of the probe stays.
        layer.fill(assembly.keys[idx].clone(), assembly.values[idx].clone(), plan.columns, 0)
    try:
        call(**plan.arguments(), use_cache=True, **{CACHE_ARGUMENT: Cache(layers=layers)})
    except _ProbeDone:
        pass
    return _deviations(prompt, assembly, plan, layers[-1].fresh[1])


def _deviations(
    prompt: Prompt, assembly: Assembly, plan: RowPlan, fresh: torch.Tensor
) -> list[np.ndarray[Any, Any]]:
    index = plan.columns[:, None, :, None].expand(-1, fresh.shape[1], -1, fresh.shape[3])
    stored = assembly.values[PROBED_LAYER].gather(2, index)
    distance = (fresh.float() - stored.float()).square().sum((1, 3)).cpu().numpy()
    columns = plan.columns.cpu().numpy()
    found = []
    for row, match in enumerate(assembly.rows):
        whole = np.zeros(prompt.columns, np.float64)
        whole[columns[row]] = distance[row]
        known = whole[prompt.pads[row] :]
        known[match.missing()] = 0
        found.append(known)
    return found
