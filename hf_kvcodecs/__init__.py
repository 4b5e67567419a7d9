"""Drop-in transformers caches that make long contexts fit, without changing what the model says."""

from .caches.gaac import GAACCache
from .caches.report import MemoryReport
from .errors import CacheMisuseError, CorruptDataError, KVCodecsError, UnsupportedLayoutError

__version__ = "0.1.0"

__all__ = [
    "CacheMisuseError",
    "CorruptDataError",
    "GAACCache",
    "KVCodecsError",
    "MemoryReport",
    "UnsupportedLayoutError",
    "__version__",
]
