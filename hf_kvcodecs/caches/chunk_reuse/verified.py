"""What ``ChunkReuseCache(verify=True)`` adds: moved text for drafts only, exact numbers after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..compat import notice_once
from .assembly import RowMatch
from .prompt import Prompt
from .report import ReuseReport

if TYPE_CHECKING:
    from .cache import ChunkReuseCache

# Called with int64 ``[batch, drafted]``, on the model's device.
OnProvisional = Callable[[torch.Tensor], object]


def check_options(verify: bool, draft_length: int, on_provisional: OnProvisional | None) -> None:
    """Raises ValueError for options of verified reuse that make no sense."""
    if draft_length < 1:
        raise ValueError(f"draft_length: expected 1 or more, got {draft_length!r}")
    if on_provisional is not None and not verify:
        raise ValueError("on_provisional: only verify=True has provisional tokens; give both")


@contextmanager
def provisional(cache: ChunkReuseCache) -> Iterator[None]:
    """Within, the first forward call may use moved text. What was made of it is gone at the end,
    whatever happens: nothing is written to the store, and the cache is empty again. A cache that
    used none is exact, and stays as it is."""
    cache.drafting = True
    try:
        yield
    finally:
        cache.drafting = False
        if cache.unverified:
            cache.reset()
            cache._is_user_defined = True  # the prompt comes again, its last logits alone wanted


def note(cache: ChunkReuseCache, report: ReuseReport) -> None:
    """Has ``cache`` report ``report``, with what the exact prefill stored."""
    cache._report = replace(report, stored_tokens=cache._report.stored_tokens)


def without_decoder() -> None:
    """Says once that nobody verifies, so that nothing is to be verified."""
    notice_once(
        "ChunkReuseCache(verify=True) was called without its decoder, so moved text is computed "
        "anew and nothing is provisional: pass generate(custom_generate=draft_verify), or call "
        "enable(model) once."
    )


def nothing_known(prompt: Prompt) -> list[RowMatch]:
    """Matches without any reuse."""
    return [RowMatch(prefix=(), moved=(), tokens=len(ids)) for ids in prompt.rows]
