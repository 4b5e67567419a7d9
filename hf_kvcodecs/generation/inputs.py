"""The inputs of a forward pass over a few new tokens of one row."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..caches.compat import CACHE_ARGUMENT

# What describes the prompt alone, or is made anew for each forward.
_NOT_FORWARDED = {"attention_mask", "position_ids", "logits_to_keep", CACHE_ARGUMENT}


class RowInputs:
    """Calls the model on new tokens of one row, with the positions and the mask that follow from
    its prompt.

    Args:
        model: the model.
        cache: its cache.
        model_kwargs: what ``generate`` prepared for the prompt's forward; ``attention_mask``
            ``[1, prompt]`` tells the padding, ``position_ids`` ``[..., prompt]`` where to go on.
        prompt_tokens: length of the prompt, padding included.
    """

    def __init__(
        self, model: Any, cache: Any, model_kwargs: dict[str, Any], prompt_tokens: int
    ) -> None:
        self.model, self.cache = model, cache
        self.mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        self.padding = 0
        if self.mask is not None:
            self.padding = int((self.mask[0] == 0).sum())
            if self.padding and bool(self.mask[0, : self.padding].any()):
                raise ValueError(
                    "attention_mask: expected padding at the left only, got zeros between or "
                    "behind tokens; set tokenizer.padding_side = 'left'"
                )
        self.shift = -self.padding  # position = index of the token + shift
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            self.shift = int(positions.flatten()[-1]) + 1 - prompt_tokens
        self.options = {k: v for k, v in model_kwargs.items() if k not in _NOT_FORWARDED}
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    def forward(self, ids: torch.Tensor, start: int, keep: int | None = None) -> torch.Tensor:
        """Logits ``[1, keep, vocab]`` of the last ``keep`` (all if None) of the tokens ``ids``
        ``[1, new]``, the first of which is the row's ``start``-th (padding counted)."""
        new = ids.shape[1]
        keep = keep or new
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, "return_dict": True}
        if self.mask is not None:
            known = self.mask[:, :start]
            ones = known.new_ones((1, start + new - known.shape[1]))
            inputs["attention_mask"] = torch.cat([known, ones], dim=1)
        if self.takes_positions:
            first = start + self.shift
            inputs["position_ids"] = torch.arange(first, first + new, device=ids.device)[None]
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = keep
        options = self.options | inputs | {CACHE_ARGUMENT: self.cache}
        logits: torch.Tensor = self.model(**options).logits
        return logits[:, -keep:]


class BatchInputs:
    """Calls the model on new tokens of all rows of a batch, behind a prompt that the cache holds.

    Args:
        model: the model.
        cache: its cache.
        model_kwargs: what ``generate`` prepared for the prompt's forward; ``attention_mask``
            ``[batch, prompt]``, ``position_ids`` ``[batch or 1, prompt]`` or nothing.
        ids: the prompt ``[batch, prompt]``.
    """

    def __init__(
        self, model: Any, cache: Any, model_kwargs: dict[str, Any], ids: torch.Tensor
    ) -> None:
        self.model, self.cache = model, cache
        self.mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        shift = ids.new_zeros(len(ids), 1)  # position = column + shift
        if self.mask is not None:
            shift = -(self.mask == 0).sum(1, keepdim=True)
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            shift = positions[:, -1:] + 1 - ids.shape[1]
        self.shift = shift
        self.options = {k: v for k, v in model_kwargs.items() if k not in _NOT_FORWARDED}

    def forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Logits ``[batch, new, vocab]`` of the tokens ``ids`` ``[batch, new]``, the first of which
        stands in column ``start``."""
        columns = torch.arange(start, start + ids.shape[1], device=ids.device)
        inputs = self.options | {
            "input_ids": ids,
            "position_ids": (columns + self.shift).expand(len(ids), -1),
            "use_cache": True,
            "return_dict": True,
            CACHE_ARGUMENT: self.cache,
        }
        if self.mask is not None:
            new = self.mask.new_ones(len(ids), start + ids.shape[1] - self.mask.shape[1])
            inputs["attention_mask"] = torch.cat([self.mask, new], dim=1)
        logits: torch.Tensor = self.model(**inputs).logits
        return logits
