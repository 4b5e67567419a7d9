"""An assistant model that proposes tokens to the draft face."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import CandidateGenerator

from ..caches.compat import CACHE_ARGUMENT


class AssistantProposer(CandidateGenerator):
    """Proposes the greedy continuation by a smaller model with the same vocabulary.

    transformers' own generator would read the whole prompt again where a cache is filled, and
    expects every proposal to be followed by a verification; drafts are taken back here by many
    tokens at a time.

    Args:
        model: the assistant.
        tokens: tokens to propose at a time; None for the assistant's ``num_assistant_tokens``, at
            most 8.
        padding: tokens at the left that are no text.

    Raises:
        ValueError: another vocabulary.
    """

    def __init__(
        self, model: Any, vocab_size: int, *, tokens: int | None = None, padding: int = 0
    ) -> None:
        theirs = model.config.get_text_config().vocab_size
        if theirs != vocab_size:
            raise ValueError(
                f"assistant_model: expected the same vocabulary ({vocab_size} tokens), got one of "
                f"{theirs}; try prompt_lookup_num_tokens=5"
            )
        configured = getattr(model.generation_config, "num_assistant_tokens", None) or 8
        self.model, self.tokens, self.padding = model, tokens or min(int(configured), 8), padding
        self._cache = DynamicCache(config=model.config)
        self._read: torch.Tensor | None = None  # [1, n]: the text that the assistant's cache holds

    def get_candidates(  # type: ignore[override]  # releases differ in what they declare
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``input_ids`` ``[1, tokens]`` with proposals behind them, and no scores."""
        text = input_ids[:, self.padding :].to(self.model.device)
        self._take_back(text)
        for _ in range(self.tokens):
            known = 0 if self._read is None else self._read.shape[1]
            with torch.no_grad():
                out = self.model(text[:, known:], use_cache=True, **{CACHE_ARGUMENT: self._cache})
            self._read = text
            text = torch.cat([text, out.logits[:, -1:].argmax(-1)], dim=1)
        proposed = text[:, input_ids.shape[1] - self.padding :].to(input_ids.device)
        return torch.cat([input_ids, proposed], dim=1), None

    def _take_back(self, text: torch.Tensor) -> None:
        """Crops the assistant's cache to what it shares with ``text``, at least one token short."""
        if self._read is None:
            return
        shared = min(self._read.shape[1], text.shape[1] - 1)
        same = (self._read[0, :shared] == text[0, :shared]).long().cumprod(0).sum()
        kept = int(same)
        self._cache.crop(kept - self._read.shape[1])
        self._read = self._read[:, :kept]

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Nothing to learn: a proposal is as long as it was asked to be."""
