"""What does a decode step hold at most? The ``--memory`` mode of ``decode_cpu.py``.

    python benchmarks/decode_cpu.py --memory

The bound is what the cache holds and one dense layer (its keys and values) more. Decoding with the
cache alone, and with the model and hardly any cache, tells apart what each of the two allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from decode_steps import Step, cache_step, model_step, prefix
from peak_memory import peak_of
from transformers import DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.report import measure

STEPS = 3
HEADERS = {
    "dtype": "dtype",
    "what": "what",
    "held_MiB": "held",
    "peak_MiB": "peak",
    "bound_MiB": "bound",
    "on_top_MiB": "on top",
    "on_top_in_dense_layers": "in dense layers",
    "new_at_peak_MiB": "allocated since, held at the peak",
}


def memory_rows(path: str, dtypes: list[str], source: str, context: int) -> list[dict[str, Any]]:
    """Both caches alone and within the model, and the model with hardly any cache."""
    ids = common.token_ids(common.load_tokenizer(path), source, context + 1)
    rows = []
    for dtype in dtypes:
        model = common.load_model(path, dtype)
        full = common.prefill(model, DynamicCache(), ids[:, :-1])
        layer_bytes = measure(full.layers).total_bytes // len(full.layers)
        alone, within = cache_step(full), model_step(model, ids[:, -1:])
        plain, packed = partial(prefix, full, context), partial(GAACCache.from_cache, full)
        cases: dict[str, tuple[Step, Callable[[], Any]]] = {
            "DynamicCache alone": (alone, plain),
            "GAACCache alone": (alone, packed),
            "DynamicCache in the model": (within, plain),
            "GAACCache in the model": (within, packed),
            "the model with 16 tokens": (within, partial(prefix, full, 16)),
        }
        for what, (step, make) in cases.items():
            case = {"dtype": dtype, "what": what, "context": context}
            rows.append(case | memory_row(step, make, layer_bytes))
    return rows


@torch.inference_mode()
def memory_row(step: Step, make: Callable[[], Any], layer_bytes: int) -> dict[str, Any]:
    """Most bytes held during a few steps, the cache included.

    Args:
        step: the step.
        make: makes the filled cache.
        layer_bytes: dense keys and values of one layer.
    """
    step(make())  # what is compiled or set up once is no part of it

    def decode(cache: Any) -> None:
        for _ in range(STEPS):
            step(cache)

    peak = peak_of(make, decode)
    new = {operation: size / 2**20 for operation, size in peak.by_operation.items()}
    return {
        "reported_MiB": measure(make().layers).total_bytes / 2**20,
        "held_MiB": peak.before / 2**20,
        "peak_MiB": peak.bytes / 2**20,
        "bound_MiB": (peak.before + layer_bytes) / 2**20,
        "on_top_MiB": (peak.bytes - peak.before) / 2**20,
        "on_top_in_dense_layers": (peak.bytes - peak.before) / layer_bytes,
        "new_at_peak_MiB": {name: size for name, size in new.items() if size >= 0.05},
    }
