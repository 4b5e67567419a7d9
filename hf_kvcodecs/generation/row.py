"""Drafting and verifying one row until it ends."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..caches.speculative import SpeculativeKVCache
from ..caches.speculative_report import DraftVerifyReport
from .candidate_generator import Draft, SameModelCandidateGenerator
from .choice import against_draft, draw
from .clock import Mark
from .draft_length import draft_length
from .inputs import RowInputs
from .repetition import repeat_context


class RowDecoder:
    """Continues one row whose prompt the cache has read.

    Args:
        inputs: calls the model on the row.
        ids: ``[1, prompt]``.
        logits_processor, stopping_criteria: as ``generate`` prepared them.
        sample: draw tokens instead of taking the likeliest.
        max_length: no more tokens than this, prompt included.
        eos_token_ids: drafting stops behind one of these.
        streamer: gets each token when it is certain.
        proposer: proposes tokens to the draft face.
        keep_scores, keep_logits: collect these for each token.
    """

    def __init__(
        self,
        inputs: RowInputs,
        ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        *,
        sample: bool,
        max_length: int,
        eos_token_ids: set[int],
        streamer: Any = None,
        proposer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.inputs, self.ids, self.sample = inputs, ids, sample
        self.processor, self.criteria = logits_processor, stopping_criteria
        self.max_length, self.streamer = max_length, streamer
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.report = DraftVerifyReport()
        self.length = draft_length(self.cache.draft_length)
        self.generator = SameModelCandidateGenerator(
            inputs,
            logits_processor,
            sample=sample,
            eos_token_ids=eos_token_ids,
            proposer=proposer,
        )
        self.finished = False

    @property
    def cache(self) -> SpeculativeKVCache:
        """The row's cache."""
        cache: SpeculativeKVCache = self.inputs.cache
        return cache

    def run(self, first_logits: torch.Tensor) -> torch.Tensor:
        """All tokens ``[1, prompt + new]``; ``first_logits`` ``[1, vocab]`` are those behind the
        prompt."""
        logits = first_logits.float()
        scores = self.processor(self.ids, logits.clone())
        token, _ = draw(scores, self.sample)
        self._emit(token, scores, logits)
        while not self.finished:
            self._round()
        return self.ids

    def _emit(self, token: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Makes ``token`` part of the text and looks whether that ends it."""
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        self.report.tokens += 1
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        kept = tuple(self.scores) if self.scores is not None else None
        self.finished = bool(self.criteria(self.ids, kept).all())

    def _prepare(self) -> None:
        """Compresses the cache (anew) where a draft needs it."""
        if not self.cache.needs_compression:
            return
        began = time.perf_counter()
        repeat_context(self.inputs, self.ids)
        self.cache.compress()
        self.report.compress_seconds += time.perf_counter() - began

    def _round(self) -> None:
        self._prepare()
        began = Mark(self.ids.device)
        # The verifier adds a token of its own, so one draft less than may still come is enough.
        room = self.max_length - self.ids.shape[1] - 1
        draft = self._draft(min(self.length.next(), room))
        drafted = draft.tokens.shape[1]
        drafted_at = Mark(self.ids.device)
        self.cache.begin_verify()
        start = self.ids.shape[1] - 1
        read = torch.cat([self.ids[:, -1:], draft.tokens], dim=1)
        logits = self.inputs.forward(read, start).float()
        emitted, accepted = self._accept(draft, logits)
        self.cache.commit(emitted, drafted + 1)
        drafting = drafted_at.seconds_since(began)
        verifying = Mark(self.ids.device).seconds_since(drafted_at)
        self.report.draft_seconds += drafting
        self.report.verify_seconds += verifying
        if drafted:
            self.report.add_round(drafted, accepted)
            self.length.observe(drafted, accepted, drafting, verifying)

    def _draft(self, tokens: int) -> Draft:
        if tokens < 1:
            return Draft(self.ids[:, :0], None, [])
        self.generator.draft_length = tokens
        return self.generator.draft(self.ids)

    def _accept(self, draft: Draft, logits: torch.Tensor) -> tuple[int, int]:
        """Emits tokens by the verifier's ``logits`` ``[1, drafted + 1, vocab]`` up to the first
        that is not the draft's; returns how many, and how many of them were drafted."""
        drafted = draft.tokens.shape[1]
        for index in range(drafted + 1):
            raw = logits[:, index]
            scores = self.processor(self.ids, raw.clone())
            if index == drafted:
                token, _ = draw(scores, self.sample)
                self._emit(token, scores, raw)
                return index + 1, index
            given = draft.probabilities[index] if draft.probabilities is not None else None
            choice = against_draft(scores, draft.tokens[:, index], given)
            self._emit(choice.token, scores, raw)
            if not choice.accepted or self.finished:
                return index + 1, index + choice.accepted
        raise AssertionError("the last token has no draft")

    def pad_to(self, tokens: int, pad_token_id: int) -> None:
        """Has the model read padding behind a row that ended early, as plain ``generate`` does
        until the last row ends."""
        missing = tokens - self.ids.shape[1]
        if not missing:
            return
        start = self.ids.shape[1] - 1
        pads = self.ids.new_full((1, missing), pad_token_id)
        read = torch.cat([self.ids[:, -1:], pads[:, :-1]], dim=1)
        logits = self.inputs.forward(read, start).float()
        for index in range(missing):
            raw = logits[:, index]
            if self.scores is not None:
                self.scores.append(self.processor(self.ids, raw.clone()))
            if self.logits is not None:
                self.logits.append(raw)
            self.ids = torch.cat([self.ids, pads[:, :1]], dim=1)
