"""Which implementation of an op runs: decided here, once per device, for every op."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

BACKENDS = ("auto", "torch", "compile")
COMPILE_FROM_ELEMENTS = 1 << 16  # below, plain torch takes under 0.2 ms, which no compilation earns back

logger = logging.getLogger(__name__)
_compile_lock = threading.Lock()
_compile_failed = False


def check_backend(backend: str) -> str:
    """``backend`` itself if it names one; raises ``ValueError`` otherwise."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend


def use_compiled(backend: str, device: torch.device, elements: int) -> bool:
    """Whether the fused op should be compiled: on a CPU by Inductor's C++ backend, unless ``backend`` is "torch".

    On other devices plain torch runs everywhere (CUDA, MPS, XPU) until an own kernel covers them.
    """
    if backend == "torch" or _compile_failed or torch.compiler.is_compiling():
        return False
    if backend == "compile":
        return True
    return device.type == "cpu" and elements >= COMPILE_FROM_ELEMENTS


def compiled_or_eager(function: Callable[..., None], eager: Callable[..., None], *args: Any) -> None:
    """Calls ``torch.compile(function)``, or ``eager`` for good, with one warning, where compiling is impossible.

    Both write the same values into the same outputs, so a failure between the two loses nothing.
    """
    global _compile_failed
    try:
        with _compile_lock:  # Dynamo compiles under its own lock, but its caches are not safe to fill from many threads
            _compile(function)(*args)
    except Exception as error:  # no compiler, no Python headers, an unsupported platform: Inductor has no common class
        _compile_failed = True
        reason = str(error).strip().splitlines() or [""]
        logger.warning(
            "Fused CPU unpacking could not be compiled (%s: %s); plain torch does the same, several times slower. "
            "A C++ compiler (g++ or clang) in PATH makes it fast.",
            type(error).__name__,
            reason[0][:200],
        )
        eager(*args)


@functools.cache
def _compile(function: Callable[..., None]) -> Callable[..., None]:
    logger.info("Compiling %s for this CPU, once (some seconds; Inductor keeps it on disk).", function.__name__)
    # Without the two thresholds Inductor writes intermediate codes to memory and is 1.6x slower (2-core AVX-512).
    options: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 100}
    return torch.compile(function, fullgraph=True, options=options)
