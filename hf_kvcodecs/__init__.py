"""Drop-in transformers caches that make long contexts fit, without changing what the model says."""

from .caches.gaac import GAACCache
from .caches.report import MemoryReport
from .caches.speculative import SpeculativeKVCache
from .caches.speculative_report import DraftVerifyReport
from .compressors import Compressor
from .errors import CacheMisuseError, CorruptDataError, KVCodecsError, UnsupportedLayoutError
from .generation.draft_verify import draft_verify
from .generation.planner import plan
from .generation.switch import disable, enable

__version__ = "0.1.0"

__all__ = [
    "CacheMisuseError",
    "Compressor",
    "CorruptDataError",
    "DraftVerifyReport",
    "GAACCache",
    "KVCodecsError",
    "MemoryReport",
    "SpeculativeKVCache",
    "UnsupportedLayoutError",
    "__version__",
    "disable",
    "draft_verify",
    "enable",
    "plan",
]
