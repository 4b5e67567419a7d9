"""Reselection: what the model attended to lately, on top of what it once attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from .base import LayerStates, Scorer, window_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Reselect(Scorer):
    """The project's own scorer, made for drafts that are checked every few tokens.

    At first the largest attention of KVzip's repetition; then, with ``reselect_rounds`` of the
    :class:`Compressor`, at each verification the larger of the decayed old score and the attention
    of the newest queries, which the verifier computes anyway over all exact keys.

    Args:
        decay: weight of an old score at each verification.
        prior: weight of the repetition's attention against that of the newest queries.
        kernel: neighbours averaged, odd.
    """

    name: ClassVar[str] = "reselect"
    window_tokens: ClassVar[int] = 32
    repeats_context: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    decay: float = 0.9
    prior: float = 1.0
    kernel: int = 1

    def score(self, states: LayerStates) -> torch.Tensor:
        score = window_attention(states).amax((1, 2))
        if self.kernel > 1:
            score = F.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)
        old = states.previous
        if old is None and states.observed is not None:
            old = self.prior * states.observed
        elif old is not None:
            old = self.decay * old
        if old is not None:
            shared = min(old.shape[1], score.shape[1])
            score[:, :shared] = torch.maximum(score[:, :shared], old[:, :shared])
        return score
