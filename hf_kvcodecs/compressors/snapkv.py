"""SnapKV: what the newest queries attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from .base import LayerStates, Scorer, window_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(Scorer):
    """Attention of the newest 64 queries, averaged over them and a head's group, pooled over
    neighbours (arXiv 2404.14469).

    Args:
        kernel: neighbours averaged, odd.
    """

    name: ClassVar[str] = "snapkv"
    window_tokens: ClassVar[int] = 64

    kernel: int = 5

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd number of at least 1, got {self.kernel!r}")

    def score(self, states: LayerStates) -> torch.Tensor:
        attention = window_attention(states).mean((1, 2))  # [kv_heads, tokens]
        return F.avg_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2)
