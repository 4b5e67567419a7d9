"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import LayerStates, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM(Scorer):
    """Newer tokens matter more; the dropper's sinks do the rest (arXiv 2309.17453)."""

    name: ClassVar[str] = "streaming_llm"

    def score(self, states: LayerStates) -> torch.Tensor:
        heads, tokens, _ = states.keys.shape
        return torch.arange(tokens, device=states.keys.device).float().expand(heads, -1)
