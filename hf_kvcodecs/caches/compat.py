"""Every difference between the supported transformers releases (5.17 and newer), and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin
from transformers.utils import logging

# 5.24 renamed `past_key_values` to `cache` in `generate`, `forward` and outputs; before it, `model(cache=...)` is
# swallowed without an error, so the signature decides and not a version string.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def notice_once(message: str) -> None:
    """One warning per message through transformers' own logging, which users know how to silence."""
    logging.get_logger("transformers.hf_kvcodecs").warning_once(message)


def attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the model handed its attention layer, where ``update`` is told (5.24 on: a dict named ``kwargs``)."""
    nested = kwargs.get("kwargs")
    return nested if isinstance(nested, dict) else {}
