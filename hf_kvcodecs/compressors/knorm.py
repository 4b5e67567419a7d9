"""Knorm: tokens with small keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import LayerStates, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Knorm(Scorer):
    """Keys of small norm attract attention (Devoto et al., arXiv 2406.11430)."""

    name: ClassVar[str] = "knorm"

    def score(self, states: LayerStates) -> torch.Tensor:
        norm: torch.Tensor = states.keys.float().norm(dim=-1)
        return -norm
