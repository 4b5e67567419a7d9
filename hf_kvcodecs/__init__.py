"""Drop-in transformers caches that make long contexts fit, without changing what the model says."""

from .caches.chunk_reuse import ChunkReuseCache, ReuseReport
from .caches.gaac import GAACCache
from .caches.report import MemoryReport
from .errors import CacheMisuseError, CorruptDataError, KVCodecsError, UnsupportedLayoutError
from .store import ChunkStore, StoreStats

__version__ = "0.1.0"

__all__ = [
    "CacheMisuseError",
    "ChunkReuseCache",
    "ChunkStore",
    "CorruptDataError",
    "GAACCache",
    "KVCodecsError",
    "MemoryReport",
    "ReuseReport",
    "StoreStats",
    "UnsupportedLayoutError",
    "__version__",
]
