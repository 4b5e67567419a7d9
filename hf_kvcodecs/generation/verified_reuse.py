"""Decoding on a ``ChunkReuseCache(verify=True)``: an early draft, the exact prefill behind it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..caches.chunk_reuse import ChunkReuseCache, ReuseReport
from ..caches.chunk_reuse.verified import note, provisional
from ..caches.compat import CACHE_ARGUMENT
from .candidate_generator import Draft
from .choice import against_draft, draw
from .inputs import BatchInputs


class VerifiedReuse:
    """Continues the rows of a batch, all at once.

    A draft is made on the cache with moved and repaired text, then thrown away with it; the prompt
    is prefilled as if that text were unknown, and the draft is read behind it and checked. From
    there on decoding is plain: what the cache holds is exact now, so a draft would cost what the
    token itself costs.

    Rows go in step: verification ends for all at the first token that some row rejects. Each row
    has a verified token of its own there, distributed as the exact prefill has it, since whether to
    stop depends on nothing behind it.

    Args:
        model: the model.
        cache: made with ``verify=True``; it holds exact states at the end, also if something fails.
        model_kwargs, config, processor, criteria: as ``generate`` prepared them.
        streamer: gets verified tokens only.
    """

    def __init__(
        self,
        model: Any,
        cache: ChunkReuseCache,
        model_kwargs: dict[str, Any],
        config: GenerationConfig,
        processor: Any,
        criteria: Any,
        streamer: Any,
    ) -> None:
        self.model, self.cache, self.model_kwargs = model, cache, model_kwargs
        self.config, self.processor, self.criteria = config, processor, criteria
        self.streamer, self.sample = streamer, bool(config.do_sample)
        eos = getattr(config, "_eos_token_tensor", None)
        self.eos: torch.Tensor | None = eos
        self.pad = int(config._pad_token_tensor or 0)
        kept = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if kept and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if kept and config.output_logits else None
        self.began, self.verified_seconds = time.perf_counter(), 0.0

    def run(self, ids: torch.Tensor) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What ``generate`` returns for the prompt ``ids`` ``[batch, prompt]``."""
        self.ids, self.prompt_tokens = ids, ids.shape[1]
        self.inputs = BatchInputs(self.model, self.cache, self.model_kwargs, ids)
        self.finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self.cache.decoding = True
        try:
            self._decode()
        finally:
            self.cache.decoding = False
        if self.streamer is not None:
            self.streamer.end()
        return self._output()

    def _decode(self) -> None:
        drafted: tuple[Draft, ReuseReport] | None = None
        with provisional(self.cache):
            logits = self._prefill()
            if self.cache.unverified:
                drafted = self._draft(logits)
        if drafted is not None:  # else nothing was moved, and these logits are exact
            draft, report = drafted
            logits = self._prefill()
            logits, accepted = self._verify(draft, logits)
            report = replace(
                report,
                provisional_tokens=draft.tokens.numel(),
                accepted_tokens=accepted,
                verified_seconds=self.verified_seconds,
            )
            note(self.cache, report)
        while not self.finished.all():
            self._emit(*self._chosen(logits))
            if not self.finished.all():
                logits = self._forward(self.ids[:, -1:], self.ids.shape[1] - 1)[:, -1]

    def _prefill(self) -> torch.Tensor:
        """Logits ``[batch, vocab]`` behind the prompt, read as plain ``generate`` reads it."""
        # A copy: prefilling in pieces takes entries out of it.
        outputs = self.model._prefill(self.ids, self.config, dict(self.model_kwargs))
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits.to(copy=True, dtype=torch.float32, device=self.ids.device)

    def _forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        return self.inputs.forward(ids, start).float()

    def _draft(self, logits: torch.Tensor) -> tuple[Draft, ReuseReport]:
        """Provisional tokens, and what the cache reused for them."""
        report = self.cache.report()
        ids, known = self.ids, self.ids.shape[1]
        ended = torch.zeros_like(self.finished)
        scores: list[torch.Tensor] = []
        probabilities: list[torch.Tensor] = []
        longest = min(self.cache.draft_length, int(self.config.max_length) - known)
        for index in range(longest):
            if index:
                logits = self._forward(ids[:, -1:], ids.shape[1] - 1)[:, -1]
            found = self.processor(ids, logits.clone())
            token, distribution = draw(found, self.sample)
            ids = torch.cat([ids, token.masked_fill(ended, self.pad)[:, None]], dim=1)
            scores.append(found)
            if distribution is not None:
                probabilities.append(distribution)
            if self.cache.on_provisional is not None:
                self.cache.on_provisional(ids[:, known:].clone())
            if not index:
                report = replace(report, provisional_seconds=time.perf_counter() - self.began)
            if self.eos is not None:
                ended |= torch.isin(token, self.eos.to(token.device))
                if bool(ended.all()):
                    break
        return Draft(ids[:, known:], probabilities if self.sample else None, scores), report

    def _verify(self, draft: Draft, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Emits drafted tokens up to the first that a row rejects, where that row has its own.

        Returns logits ``[batch, vocab]`` behind the last emitted token (anything where all rows
        have ended), and how many drafted tokens were accepted, over all rows.
        """
        accepted, all_logits = 0, logits[:, None]
        for index in range(draft.tokens.shape[1]):
            if index == 1:  # the first token needs the prompt alone, and goes out without waiting
                behind = self._forward(draft.tokens, self.prompt_tokens)
                all_logits = torch.cat([all_logits, behind], dim=1)
            raw = all_logits[:, index]
            scores = self.processor(self.ids, raw.clone())
            given = draft.probabilities[index] if draft.probabilities is not None else None
            going = ~self.finished
            token = [
                against_draft(
                    scores[[row]],
                    draft.tokens[[row], index],
                    None if given is None else given[[row]],
                ).token
                for row in range(len(scores))
            ]
            self._emit(torch.cat(token), scores, raw)
            agreed = self.ids[:, -1] == draft.tokens[:, index]
            accepted += int((agreed & going).sum())
            if not agreed.all() or self.finished.all():
                break
        known, held = self.ids.shape[1], self.cache.get_seq_length()
        ended = bool(self.finished.all())
        if agreed.all() and held == known and not ended:
            return all_logits[:, -1], accepted
        if held >= known:  # as plain decoding leaves it: the last token is not read
            self.cache.crop(known - 1 - held)
        if ended:
            return logits, accepted
        return self._forward(self.ids[:, -1:], known - 1)[:, -1], accepted

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self.processor(self.ids, logits.clone())
        return draw(scores, self.sample)[0], scores, logits

    def _emit(self, token: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Makes ``token`` ``[batch]`` part of the texts that go on, and looks which of them end."""
        token = token.masked_fill(self.finished, self.pad)
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        if not self.verified_seconds:
            self.verified_seconds = time.perf_counter() - self.began
        kept = tuple(self.scores) if self.scores is not None else None
        self.finished = self.finished | self.criteria(self.ids, kept)

    def _output(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        sequences: Any = self.ids
        if not self.config.return_dict_in_generate:
            return cast(torch.Tensor, sequences)
        collected: dict[str, Any] = {CACHE_ARGUMENT: self.cache}
        for name in ("scores", "logits"):
            if (steps := getattr(self, name)) is not None:
                collected[name] = tuple(steps)
        return GenerateDecoderOnlyOutput(sequences=sequences, **collected)
