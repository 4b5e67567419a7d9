"""The few exceptions of our own; mistakes in arguments raise ``ValueError`` or ``TypeError``."""


class KVCodecsError(Exception):
    """Base class of the exceptions below."""


class CorruptDataError(KVCodecsError, ValueError):
    """Packed bytes or a file contradict themselves: truncated, damaged, or not ours."""


class UnsupportedLayoutError(KVCodecsError, ValueError):
    """A layout, codec or file version that this release cannot read (a newer one, usually)."""


class CacheMisuseError(KVCodecsError, ValueError):
    """A cache was given states that cannot continue what it holds; the cache is left unchanged."""


class PoolFullError(KVCodecsError, RuntimeError):
    """A pool has no room for what was asked, and nothing was taken from it; other caches in it are
    not affected."""
