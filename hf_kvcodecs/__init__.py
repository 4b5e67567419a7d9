"""Drop-in transformers caches that make long contexts fit, without changing what the model says."""

from .caches.chunk_reuse import ChunkReuseCache, ReuseReport
from .caches.gaac import GAACCache
from .caches.pool import BlockPool
from .caches.report import MemoryReport
from .caches.speculative import SpeculativeKVCache
from .caches.speculative_report import DraftVerifyReport
from .compressors import Compressor
from .errors import (
    CacheMisuseError,
    CorruptDataError,
    KVCodecsError,
    PoolFullError,
    UnsupportedLayoutError,
)
from .generation.draft_verify import draft_verify
from .generation.planner import plan
from .generation.switch import disable, enable
from .store import ChunkStore, StoreStats

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "CacheMisuseError",
    "ChunkReuseCache",
    "ChunkStore",
    "Compressor",
    "CorruptDataError",
    "DraftVerifyReport",
    "GAACCache",
    "KVCodecsError",
    "MemoryReport",
    "PoolFullError",
    "ReuseReport",
    "SpeculativeKVCache",
    "StoreStats",
    "UnsupportedLayoutError",
    "__version__",
    "disable",
    "draft_verify",
    "enable",
    "plan",
]
