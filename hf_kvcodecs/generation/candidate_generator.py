"""Drafts by the model itself, reading the compressed face of its cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..caches.compat import notice_once
from ..caches.speculative import SpeculativeKVCache
from .choice import draw
from .draft_step import DraftStep
from .inputs import RowInputs

STAGED_LAYERS = 4  # behind each draft step


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to check.

    Attributes:
        tokens: int64 ``[1, drafted]``.
        probabilities: by token the distribution ``[1, vocab]`` it was drawn from; None if greedy.
        scores: by token, processed logits ``[1, vocab]``.
    """

    tokens: torch.Tensor
    probabilities: list[torch.Tensor] | None
    scores: list[torch.Tensor]


class SameModelCandidateGenerator(CandidateGenerator):
    """Drafts with the model on the draft face of a :class:`SpeculativeKVCache`.

    The cache is left on the draft face; :meth:`SpeculativeKVCache.begin_verify` follows.

    Args:
        inputs: calls the model on the row.
        logits_processor: applied to the draft's logits as to the verifier's.
        sample: draw tokens instead of taking the likeliest.
        eos_token_ids: on a CPU drafting stops behind one of these.
        draft_length: tokens of a draft, until told otherwise.
        proposer: another candidate generator (prompt lookup, an assistant model) whose proposals
            the draft face checks several at a time; drafts are the same, with fewer forwards.
    """

    requires_model_outputs = False

    def __init__(
        self,
        inputs: RowInputs,
        logits_processor: Any,
        *,
        sample: bool = False,
        eos_token_ids: Collection[int] = (),
        draft_length: int = 25,
        proposer: Any = None,
    ) -> None:
        self.inputs, self.logits_processor, self.sample = inputs, logits_processor, sample
        self.eos_token_ids, self.draft_length = eos_token_ids, draft_length
        self.proposer = proposer
        self._step: DraftStep | None = None

    @property
    def cache(self) -> SpeculativeKVCache:
        """The cache whose draft face is read."""
        cache: SpeculativeKVCache = self.inputs.cache
        return cache

    def get_candidates(  # type: ignore[override]  # releases differ in what they declare
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``input_ids`` ``[1, tokens]`` with drafts behind them, and the drafts' scores
        ``[1, drafted, vocab]``, as transformers' assisted decoding wants them."""
        draft = self.draft(input_ids)
        scores = torch.stack(draft.scores, dim=1) if draft.scores else None
        return torch.cat([input_ids, draft.tokens], dim=1), scores

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Nothing to learn here: draft lengths are :mod:`draft_length`'s."""

    def draft(self, ids: torch.Tensor) -> Draft:
        """Up to ``draft_length`` tokens behind ``ids`` ``[1, tokens]``, whose last one is not in
        the cache yet."""
        self.cache.begin_draft()
        known, drafted = ids.shape[1], ids
        probabilities: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        while drafted.shape[1] - known < self.draft_length:
            proposals = self._proposals(drafted, known + self.draft_length - drafted.shape[1] - 1)
            start = drafted.shape[1] - 1
            logits = self._forward(torch.cat([drafted[:, -1:], proposals], dim=1), start)
            self.cache.stage(STAGED_LAYERS)
            for index in range(logits.shape[1]):
                found = self.logits_processor(drafted, logits[:, index].float())
                token, distribution = draw(found, self.sample)
                drafted = torch.cat([drafted, token[:, None]], dim=1)
                scores.append(found)
                if distribution is not None:
                    probabilities.append(distribution)
                if index < proposals.shape[1] and bool(token != proposals[0, index]):
                    break
            if proposals.shape[1]:
                self.cache.drop_drafts(drafted.shape[1] - known)
            # To look would have a GPU wait for the host each time; what comes behind an end of text
            # is drafted once and never emitted.
            if drafted.is_cpu and int(drafted[0, -1]) in self.eos_token_ids:
                break
        tokens = drafted[:, known:]
        return Draft(tokens, probabilities if self.sample else None, scores)

    def _forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        if ids.shape[1] > 1 or not self.cache.drafts_statically:
            if ids.shape[1] == 1 and self.cache.compile_drafts:
                notice_once(
                    "compile_drafts: only draft steps of fixed shape are compiled; see graphs= of "
                    "SpeculativeKVCache for where they are."
                )
            return self.inputs.forward(ids, start)
        if self._step is None or not self._step.valid:
            self._step = None  # gives the old graph's memory back first
            self._step = DraftStep(self.inputs)
        return self._step(ids, start)

    def _proposals(self, ids: torch.Tensor, most: int) -> torch.Tensor:
        """Up to ``most`` tokens ``[1, n]`` that the proposer would put behind ``ids``."""
        if self.proposer is None or most < 1:
            return ids[:, :0]
        candidates, _ = self.proposer.get_candidates(ids)
        proposed: torch.Tensor = candidates[:, ids.shape[1] : ids.shape[1] + most].to(ids.device)
        return proposed
