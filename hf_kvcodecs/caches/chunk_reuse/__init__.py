"""``ChunkReuseCache``: reuse of text seen before, wherever it stands in the prompt."""

from __future__ import annotations

from .cache import ChunkReuseCache
from .report import ReuseReport

__all__ = ["ChunkReuseCache", "ReuseReport"]
