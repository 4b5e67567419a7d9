"""Online scores: from a token's own key and value, without queries and without a second reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .base import LayerStates, Scorer

FORMAT_VERSION = "1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Online(Scorer):
    """A small linear model that guesses KVzip's score of each token as it arrives.

    In KVzap's manner, with one difference: it reads a token's key and value, so that nothing is
    hooked into the model, where KVzap reads hidden states. Without weights it needs no training,
    and is much weaker: the value's norm, less for keys of large norm. Fit it to a model with
    :func:`hf_kvcodecs.generation.fit.fit_online`, in a minute or two.

    Args:
        weights: float32 ``[layers, kv_heads, features]``, see :func:`features`; None for the rule.
    """

    name: ClassVar[str] = "online"

    weights: torch.Tensor | None = None

    def score(self, states: LayerStates) -> torch.Tensor:
        if self.weights is None:
            norm = states.keys.float().norm(dim=-1)
            spread = norm.std(-1, keepdim=True, correction=0) + 1e-6
            relative = (norm - norm.mean(-1, keepdim=True)) / spread
            rule: torch.Tensor = states.values.float().norm(dim=-1).log1p() - relative
            return rule
        if states.layer_idx >= self.weights.shape[0]:
            raise ValueError(
                f"weights: expected some for layer {states.layer_idx}, got {self.weights.shape[0]} "
                "layers; fit the scorer on this model with fit_online(model, ...)"
            )
        weights = self.weights[states.layer_idx].to(states.keys.device)
        found = features(states.keys, states.values)
        if found.shape[0] != weights.shape[0] or found.shape[2] != weights.shape[1]:
            raise ValueError(
                f"weights: expected [kv_heads, features] = {found.shape[0], found.shape[2]}, got "
                f"{tuple(weights.shape)}; fit the scorer on this model with fit_online(model, ...)"
            )
        return (found @ weights.unsqueeze(-1)).squeeze(-1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the weights to a safetensors file."""
        if self.weights is None:
            raise ValueError("weights: expected a fitted scorer to save, got the untrained rule")
        partial = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
        metadata = {"format": "hf_kvcodecs.online", "version": FORMAT_VERSION}
        save_file({"weights": self.weights.contiguous()}, partial, metadata=metadata)
        partial.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Online:
        """The scorer that :meth:`save` wrote.

        Raises:
            ValueError: another file, or one of a newer release.
        """
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != "hf_kvcodecs.online":
                raise ValueError(f"{path}: expected a file by Online.save, got {metadata}")
            if metadata.get("version") != FORMAT_VERSION:
                raise ValueError(
                    f"{path}: expected version {FORMAT_VERSION}, got {metadata.get('version')}; "
                    "install a newer hf_kvcodecs, or fit again"
                )
            return cls(weights=file.get_tensor("weights"))


def features(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What the model sees of each token: float32 ``[kv_heads, tokens, features]``, key and value
    each divided by its norm, the norms' logarithms, one."""
    parts = []
    for states in (keys.float(), values.float()):
        norm = states.norm(dim=-1, keepdim=True) + 1e-6
        parts += [states / norm, norm.log()]
    return torch.cat([*parts, torch.ones_like(parts[1])], dim=-1)
