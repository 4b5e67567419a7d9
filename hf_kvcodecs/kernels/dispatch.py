"""Which implementation of an op runs: decided here, once per device, for every op."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

BACKENDS = ("auto", "torch", "compile")
COMPILE_FROM_ELEMENTS = (
    1 << 16
)  # below, plain torch takes under 0.2 ms, which no compilation earns back

OLDEST_TRITON = (3, 6)

logger = logging.getLogger(__name__)
_compile_works = True
_noticed: set[str] = set()


def check_backend(backend: str) -> str:
    """``backend`` itself if it names one; raises ``ValueError`` otherwise."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {backend!r}"
        )
    return backend


def use_compiled(backend: str, device: torch.device, elements: int) -> bool:
    """Whether the fused op should be compiled: on a CPU by Inductor's C++ backend, unless
    ``backend`` is "torch".

    On other devices plain torch runs everywhere (CUDA, MPS, XPU) until an own kernel covers them.
    """
    if backend == "torch" or not _compile_works or torch.compiler.is_compiling():
        return False
    return device.type == "cpu" and (backend == "compile" or elements >= COMPILE_FROM_ELEMENTS)


def compiled_or_eager(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """What ``torch.compile(function)`` returns; where compiling is impossible, ``function`` itself.

    The latter with one warning. ``function`` must not change its arguments.
    """
    global _compile_works
    try:
        return _compile(function)(*args)
    except Exception as error:  # no compiler, no Python headers, ...: Inductor has no common class
        result = function(*args)  # raises by itself what has nothing to do with compiling
        kind = type(error).__name__
        if kind != "FailOnRecompileLimitHit":  # that one concerns only new shapes
            _compile_works = False
        if kind not in _noticed:
            _noticed.add(kind)
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            logger.warning(
                "Fused CPU unpacking could not be compiled (%s: %s). Plain torch does the same, "
                "several times slower; a C++ compiler (g++ or clang) in PATH makes it fast.",
                kind,
                reason,
            )
        return result


@functools.cache
def _compile(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    logger.info(
        "Compiling %s for this CPU, once (some seconds; Inductor keeps it on disk).",
        function.__name__,
    )
    # Without the two thresholds Inductor writes intermediate codes to memory and is 1.6x slower
    # (2-core AVX-512).
    options: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 100}
    limit: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # One variant per head_dim and dtype: Dynamo's own 8 is soon used up.
        limit["recompile_limit"] = 256
    return torch.compile(function, fullgraph=True, options=options, **limit)


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on ``device``, or None if they can. On CPUs they run in
    Triton's interpreter only (``TRITON_INTERPRET=1``), for tests."""
    if importlib.util.find_spec("triton") is None:
        return "anything here: Triton is not installed (pip install triton)"
    if _triton_version() < OLDEST_TRITON:
        wanted = ".".join(map(str, OLDEST_TRITON))
        return f"anything here: it needs Triton {wanted} or newer (pip install -U triton)"
    if device.type == "cuda":
        if torch.version.hip or capability(device) >= 8:
            return None
        return f"tensors on {device}: bf16 kernels need an NVIDIA GPU of capability 8.0 or newer"
    if device.type == "cpu" and interpreted():
        return None
    return f"tensors on {device}: Triton kernels run on CUDA and ROCm devices"


def fused_device(device: torch.device) -> bool:
    """Whether caches on ``device`` are kept in the kernels' own memory. Not on CPUs, where kernels
    are only interpreted, nor on AMD GPUs, where they have never been run."""
    return device.type == "cuda" and not torch.version.hip and triton_missing(device) is None


@functools.cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@functools.cache
def capability(device: torch.device) -> int:
    """The first number of an NVIDIA GPU's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def launch_options(device: torch.device) -> dict[str, bool]:
    """Which variant of a kernel ``device`` takes: inline PTX on NVIDIA GPUs; in the interpreter,
    whose bf16 products are wrong, fp32 ones."""
    return {"PTX": device.type == "cuda" and not torch.version.hip, "UPCAST": interpreted()}


def on_device(device: torch.device) -> torch.cuda.device:
    """A context in which kernels are launched on ``device``; none needed on CPUs."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
