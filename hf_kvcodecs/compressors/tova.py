"""TOVA: what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import LayerStates, Scorer, window_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVA(Scorer):
    """Attention of the newest token, averaged over all heads of the layer (arXiv 2401.06104)."""

    name: ClassVar[str] = "tova"
    window_tokens: ClassVar[int] = 1

    def score(self, states: LayerStates) -> torch.Tensor:
        attention = window_attention(states)[:, :, -1]
        heads = states.keys.shape[0]
        return attention.mean((0, 1)).expand(heads, -1)
