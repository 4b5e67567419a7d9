"""The contract of draft caches: what a compressor sees, and what it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .quantise import Quantiser

BUDGETS = ("uniform", "heads", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """One layer of one request, as a scorer sees it (rotary positions already applied).

    Attributes:
        keys, values: ``[kv_heads, tokens, head_dim]``, any floating dtype.
        queries: ``[q_heads, window, head_dim]``, those of the newest ``window`` tokens; None for
            scorers that ask for none.
        layer_idx: the layer's place in the model.
        scale: what attention multiplies the products with; None for ``head_dim ** -0.5``.
        previous: float32 ``[kv_heads, older]``, the scores of older tokens when they were scored
            last; None at first, and unless ``remembers``.
        observed: float32 ``[kv_heads, tokens]``, the largest attention that each token received
            while the model repeated its context; None unless ``repeats_context``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None = None
    scale: float | None = None
    layer_idx: int = 0
    observed: torch.Tensor | None = None
    previous: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer(ABC):
    """Says how much each cached token matters: a dropper keeps those with the largest scores."""

    name: ClassVar[str]
    window_tokens: ClassVar[int] = 0  # newest queries that `score` wants
    repeats_context: ClassVar[bool] = False  # wants `observed`, for which the model reads twice
    remembers: ClassVar[bool] = False  # wants `previous`

    @abstractmethod
    def score(self, states: LayerStates) -> torch.Tensor:
        """float32 ``[kv_heads, tokens]``, larger for tokens to keep."""


def window_attention(states: LayerStates) -> torch.Tensor:
    """What the newest queries attend to: float32 ``[kv_heads, group, window, tokens]``, causal.

    Raises:
        ValueError: no queries were recorded.
    """
    if states.queries is None or not states.queries.shape[1]:
        raise ValueError(
            "queries: this scorer needs those of the newest tokens, got none; they are recorded "
            "under sdpa attention only: model.set_attn_implementation('sdpa')"
        )
    heads, tokens, head_dim = states.keys.shape
    window = states.queries.shape[1]
    queries = states.queries.float().unflatten(0, (heads, -1))  # [kv_heads, group, window, d]
    scale = float(head_dim) ** -0.5 if states.scale is None else states.scale
    logits = queries @ states.keys.float()[:, None].transpose(-1, -2) * scale
    own = torch.arange(tokens - window, tokens, device=logits.device)[:, None]
    later = torch.arange(tokens, device=logits.device) > own
    attention: torch.Tensor = logits.masked_fill(later, float("-inf")).softmax(-1)
    return attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropper:
    """Keeps a part of the tokens: those that a scorer ranks first.

    Args:
        scorer: ranks them.
        keep: part of the tokens kept, over all layers and heads, in (0, 1]; sinks and recent
            tokens are counted in.
        budget: "uniform": as many in every head of every layer. "heads": the heads of a layer share
            the layer's budget (AdaKV, arXiv 2407.11550). "model": all heads of all layers share one
            (KVzip's non-uniform budgets, arXiv 2505.23416).
        sink_tokens, recent_tokens: the first and the newest tokens, kept in any case.
        floor: with shared budgets, the part of an equal share that each head has for certain.
    """

    scorer: Scorer
    keep: float
    budget: str = "uniform"
    sink_tokens: int = 4
    recent_tokens: int = 32
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep: expected a part in (0, 1], got {self.keep!r}; try 0.2")
        if self.budget not in BUDGETS:
            raise ValueError(f"budget: expected one of {', '.join(BUDGETS)}, got {self.budget!r}")
        if self.sink_tokens < 0 or self.recent_tokens < 1:
            raise ValueError(
                "sink_tokens, recent_tokens: expected at least 0 and 1, got "
                f"{self.sink_tokens!r} and {self.recent_tokens!r}"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor: expected a part in [0, 1], got {self.floor!r}")

    def select(self, scores: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The positions to keep, int64 and ascending, by layer and head.

        Args:
            scores: by layer, float32 ``[kv_heads, tokens]``; left as they are.
        """
        scores = [self._with_certain_tokens(score) for score in scores]
        if self.budget == "model":
            together = torch.cat([score.flatten() for score in scores])
            kept = _largest(together, sum(self._share(score) for score in scores))
            masks = list(
                part.view_as(score)
                for part, score in zip(
                    kept.split([score.numel() for score in scores]), scores, strict=True
                )
            )
        elif self.budget == "heads":
            masks = [
                _largest(score.flatten(), self._share(score)).view_as(score) for score in scores
            ]
        else:
            masks = [
                torch.stack([_largest(head, self._share(head[None])) for head in score])
                for score in scores
            ]
        return [[head.nonzero().flatten() for head in mask] for mask in masks]

    def reselect(self, score: torch.Tensor, parts: list[float]) -> list[torch.Tensor]:
        """The positions to keep in one layer, by head, if head ``h`` keeps ``parts[h]`` of its
        tokens: how a selection is renewed without changing what each head gets."""
        tokens = score.shape[1]
        counts = [max(1, min(round(part * tokens), tokens)) for part in parts]
        score = self._with_certain_tokens(score)
        return [
            _largest(head, count).nonzero().flatten()
            for head, count in zip(score, counts, strict=True)
        ]

    def _share(self, score: torch.Tensor) -> int:
        """Tokens that ``score`` ``[kv_heads, tokens]`` may keep; at least one a head."""
        heads, tokens = score.shape
        return heads * max(1, min(round(self.keep * tokens), tokens))

    def _with_certain_tokens(self, score: torch.Tensor) -> torch.Tensor:
        """``score`` with infinity where a token is kept in any case, within the budget."""
        score = torch.nan_to_num(score.float(), nan=0.0, posinf=3e38, neginf=-3e38)
        tokens = score.shape[1]
        share = self._share(score[:1])
        recent = min(self.recent_tokens, max(1, share // 2))
        sinks = min(self.sink_tokens, share - recent)
        score[:, tokens - recent :] = float("inf")
        score[:, :sinks] = float("inf")
        if self.budget != "uniform":
            certain = max(recent + sinks, int(self.floor * share))
            top = score.topk(min(certain, tokens), dim=-1).indices
            score.scatter_(1, top, float("inf"))
        return score


def _largest(score: torch.Tensor, count: int) -> torch.Tensor:
    """Which elements of the one-dimensional ``score`` are among the ``count`` largest, as bool."""
    mask = torch.zeros_like(score, dtype=torch.bool)
    mask[score.topk(min(count, score.numel())).indices] = True
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """A way to shrink the KV cache of the draft face: a dropper, a quantiser, or both.

    Lossy; the decoder makes up for it, so a compressor decides about speed alone, never about what
    is generated.

    Args:
        dropper: which tokens stay; None keeps all.
        quantiser: how those are stored; None stores them as they are.
        reselect_rounds: every so many verifications the tokens to keep are chosen anew, by the
            verifier's own attention, while its keys and values are at hand; None never does.
    """

    dropper: Dropper | None = None
    quantiser: Quantiser | None = None
    reselect_rounds: int | None = None
    name: str = field(default="")

    def __post_init__(self) -> None:
        if self.reselect_rounds is not None and (self.reselect_rounds < 1 or not self.dropper):
            raise ValueError(
                f"reselect_rounds: expected None, or at least 1 beside a dropper, got "
                f"{self.reselect_rounds!r}"
            )
        if not self.name:
            parts = [self.dropper.scorer.name] if self.dropper else []
            parts += [self.quantiser.name] if self.quantiser else []
            object.__setattr__(self, "name", "+".join(parts) or "identity")

    @property
    def window_tokens(self) -> int:
        """Newest queries to record for each layer."""
        return self.dropper.scorer.window_tokens if self.dropper else 0

    @property
    def repeats_context(self) -> bool:
        """Whether the model has to read its context a second time before :meth:`select`."""
        return self.dropper is not None and self.dropper.scorer.repeats_context

    def score(self, states: LayerStates) -> torch.Tensor | None:
        """The scores of one layer, None where nothing is dropped."""
        return self.dropper.scorer.score(states) if self.dropper else None

    def select(
        self, scores: list[torch.Tensor | None], tokens: int, heads: int
    ) -> list[list[torch.Tensor]]:
        """Kept positions by layer and head, ascending int64 on the CPU or the scores' device."""
        if self.dropper is None:
            return [[torch.arange(tokens)] * heads for _ in scores]
        return self.dropper.select([score for score in scores if score is not None])
