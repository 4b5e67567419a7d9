"""ExpectedAttention: what queries like the newest ones will attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import LayerStates, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAttention(Scorer):
    """The expected exponential of the product with a Gaussian of queries, times the value's norm.

    After NVIDIA's kvpress (arXiv 2510.00636), with one difference: the Gaussian's mean and
    covariance are those of the newest 256 queries as they are, rotary positions applied, instead of
    unrotated queries carried to future positions.
    """

    name: ClassVar[str] = "expected_attention"
    window_tokens: ClassVar[int] = 256

    def score(self, states: LayerStates) -> torch.Tensor:
        if states.queries is None or not states.queries.shape[1]:
            raise ValueError(
                "queries: expected those of the newest tokens, got none; they are recorded under "
                "sdpa attention only: model.set_attn_implementation('sdpa')"
            )
        heads, _, head_dim = states.keys.shape
        scale = head_dim**-0.5 if states.scale is None else states.scale
        queries = states.queries.float().unflatten(0, (heads, -1))
        mean = queries.mean(-2, keepdim=True)  # [kv_heads, group, 1, head_dim]
        centred = queries - mean
        keys = states.keys.float()[:, None]
        # Through the queries instead of their covariance: k' C k is the mean of (k' q)^2.
        spread = (centred @ keys.transpose(-1, -2) * scale).square().mean(-2)
        logits = (mean @ keys.transpose(-1, -2)).squeeze(-2) * scale + spread / 2
        attention = logits.softmax(-1).mean(1)
        score: torch.Tensor = attention * states.values.float().norm(dim=-1)
        return score
