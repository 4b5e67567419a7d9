"""How long a decode step takes on a GPU with each cache, and what the cache takes in memory.

    python benchmarks/decode.py --kv kv.safetensors

Llama-3.1-8B's shape with random weights, eager, sdpa. The caches are filled, layer by layer, with
keys and values of a real model (``python benchmarks/capture_kv.py`` writes them), repeated to the
context wanted; no prefill is timed. Milliseconds are medians of whole steps of
``model(input_ids=...)``, host time included: eager decoding of short contexts is bound by the host.
Before a GAACCache is timed its numbers are compared with DynamicCache's, bit for bit, and its
logits for the same token; after it, the calls of the fused kernel are counted: one for each layer
and step, or the run stops.

``limit`` is the time in which weights and packed keys and values can be read once at 4.3 TB/s.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attention import states
from common import (
    NotExactError,
    argument_parser,
    check_same,
    environment,
    print_table,
    write_results,
)
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches import lazy_attention
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

CASES = ((1, 8192), (1, 32768), (1, 65536), (4, 65536), (1, 131072))
READ_BYTES_PER_SECOND = 4.3e12


def llama_8b() -> LlamaForCausalLM:
    """Llama-3.1-8B's shape with random weights, bf16, on the GPU."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072 + 1024,
        attn_implementation="sdpa", dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def fill(cache: Any, kv: dict[str, torch.Tensor], config: LlamaConfig, batch: int, tokens: int):
    """``cache`` with every layer holding ``tokens`` tokens of real keys and values."""
    shape = batch, config.num_key_value_heads, tokens, 128
    keys, values = (states(kv, kind, *shape) for kind in ("keys", "values"))
    for layer in range(config.num_hidden_layers):
        cache.update(keys.roll(layer, 1), values.roll(layer, 1), layer)
    return cache


@torch.inference_mode()
def step_times(model: Any, cache: Any, token: torch.Tensor, steps: int) -> list[float]:
    """Milliseconds of each decode step."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


@torch.inference_mode()
def logits(model: Any, cache: Any, token: torch.Tensor) -> torch.Tensor:
    return model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache}).logits.float()


def case(model: Any, kv: dict[str, torch.Tensor], batch: int, tokens: int, steps: int):
    """One line of the table."""
    token = torch.full((batch, 1), 7, device="cuda")
    layers = model.config.num_hidden_layers
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    caches = {"DynamicCache": DynamicCache(), "GAACCache": GAACCache()}
    for cache in caches.values():
        fill(cache, kv, model.config, batch, tokens)
    check_same(caches["DynamicCache"], caches["GAACCache"])
    expected, found = (logits(model, cache, token) for cache in caches.values())
    row["logit_error"] = float((found - expected).norm() / expected.norm())
    memory = caches["GAACCache"].memory()
    row["ratio"] = memory.ratio
    weights = sum(p.nbytes for p in model.parameters())
    row["limit"] = (weights + memory.total_bytes) / READ_BYTES_PER_SECOND * 1e3
    for name in list(caches):
        cache = caches.pop(name)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        before = lazy_attention.calls.copy()
        times = step_times(model, cache, token, steps)
        done = lazy_attention.calls - before
        if name == "GAACCache" and (done["fused"], done["dense"]) != (layers * steps, 0):
            raise NotExactError(f"fused attention: {done}, expected {layers * steps} calls")
        row[name] = statistics.median(times[2:])
        row[f"{name} all"] = [round(t, 2) for t in times]
        row[f"{name} peak GiB"] = (torch.cuda.max_memory_allocated() - held) / 2**30
        del cache
        torch.cuda.empty_cache()
    row["factor"] = row["DynamicCache"] / row["GAACCache"]
    return row


def main() -> None:
    parser = argument_parser(__doc__, "decode")
    parser.add_argument("--kv", type=Path, required=True, help="captured keys and values")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    kv, model, rows = load_file(args.kv), llama_8b(), []
    for batch, tokens in CASES:
        rows.append(case(model, kv, batch, tokens, args.steps))
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    env = environment("Llama-3.1-8B shape") | {"gpu": torch.cuda.get_device_name()}
    write_results(args.out, env, rows)
    names = ("batch", "tokens", "DynamicCache", "GAACCache", "factor", "limit", "ratio")
    print_table("Milliseconds per decode step, eager", rows, {name: name for name in names})


if __name__ == "__main__":
    main()
