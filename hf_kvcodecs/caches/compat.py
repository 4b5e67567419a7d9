"""The differences between the supported transformers releases (5.17 and newer), all of them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.utils import logging

# 5.24 renamed `past_key_values` to `cache` in `generate`, `forward` and outputs; before it,
# `model(cache=...)` is swallowed without an error, so the signature decides and not a version
# string.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def notice_once(message: str) -> None:
    """One warning per message through transformers' own logging, which users know how to
    silence."""
    logging.get_logger("transformers.hf_kvcodecs").warning_once(message)


def attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the model handed its attention layer, where ``update`` is told (5.24 on: a dict named
    ``kwargs``)."""
    nested = kwargs.get("kwargs")
    return nested if isinstance(nested, dict) else {}


def calling_attention(depth: int = 8) -> str | None:
    """The attention implementation of the module that is calling ``update``, None if unknown.

    A cache made without a config is told nothing of the model. The attention module that is just
    calling it knows, so its frame is read: the one way that needs neither an argument from the
    user nor a patch of transformers.
    """
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            break
        frame = frame.f_back
        # Reading f_locals makes Python keep them: of methods alone, not of who made the cache.
        if frame.f_code.co_varnames[:1] != ("self",):
            continue
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            config = getattr(module, "config", None)
            implementation: str | None = getattr(config, "_attn_implementation", None)
            if implementation is not None:
                return implementation
    return None


def generate_arguments(*names: str, depth: int = 12) -> dict[str, Any]:
    """What the ``generate`` that is calling was given under ``names``, as far as it can be seen.

    With a callable ``custom_generate``, transformers hands on neither the streamer nor the
    assistant model, so they are read from the calling frame.
    """
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return {name: frame.f_locals.get(name) for name in names}
    return dict.fromkeys(names)
