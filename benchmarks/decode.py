"""How long a decode step takes on a GPU with each cache, and what the cache takes in memory.

    python benchmarks/decode.py --kv kv.safetensors

Llama-3.1-8B's shape with random weights, sdpa. The caches are filled, layer by layer, with keys and
values of a real model (``python benchmarks/capture_kv.py`` writes them), repeated to the context
wanted; no prefill is timed. A step is one of ``model.generate`` as users call it: the time between
two looks at its stopping criteria, everything on the host included; medians, the first steps (where
graphs are compiled and captured) left out.

eager: ``DynamicCache``, ``GAACCache()``. compiled, by ``generate`` itself, CUDA graphs included:
``StaticCache``, ``GAACCache(config, max_tokens=)``. offloaded to pinned host memory:
``DynamicCache(offloading=True)``, ``GAACCache(offload="cpu")``; ``link`` is the time that a plain
copy of as many bytes as the latter's takes.

Before a GAACCache is timed its numbers are compared with DynamicCache's, bit for bit. While it is
timed the calls of the fused kernel are counted: one for each layer and step, or the run stops.
``logit error`` is that of one more step against DynamicCache; beside it, what DynamicCache differs
from itself with another of torch's attention kernels.

``limit`` is the time in which weights and packed keys and values can be read once at 4.3 TB/s.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

CASES = ((1, 8192), (1, 65536), (4, 65536), (1, 131072))
READ_BYTES_PER_SECOND = 4.3e12
WARM_UP = 8  # steps until everything is compiled and captured
PEERS = ("DynamicCache", "StaticCache", "offloaded")


def llama_8b() -> LlamaForCausalLM:
    """Llama-3.1-8B's shape with random weights, bf16, on the GPU."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072 + 1024,
        attn_implementation="sdpa", dtype=torch.bfloat16, eos_token_id=None, pad_token_id=0,
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


class Clock(StoppingCriteria):
    """Stops nothing; notes when it was asked, that is, after each token."""

    def __init__(self, batch: int) -> None:
        self.times: list[float] = []
        self.answer = torch.zeros(batch, dtype=torch.bool, device="cuda")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())  # `generate` waits for the device once a step
        return self.answer


def generate(model: Any, cache: Any, batch: int, held: int, steps: int) -> list[float]:
    """Milliseconds of each of ``steps`` decode steps behind the ``held`` tokens in ``cache``."""
    ids = torch.full((batch, held + 1), 7, device="cuda")
    clock = Clock(batch)
    model.generate(
        ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=steps + 1, do_sample=False,
        attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([clock]),
    )  # fmt: skip
    return [(b - a) * 1e3 for a, b in zip(clock.times, clock.times[1:], strict=False)]


def fused_calls(run: Callable[[], Any]) -> int:
    """Launches of the fused attention kernel in ``run``, those within graphs too."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in trace.key_averages() if "_packed_attention_kernel" in e.key)


@torch.inference_mode()
def logits(model: Any, cache: Any, batch: int) -> torch.Tensor:
    token = torch.full((batch, 1), 7, device="cuda")
    return model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache}).logits.float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def link_time(cache: Any) -> float:
    """Milliseconds in which a copy from pinned memory brings a layer's packed blocks, times the
    layers."""
    words = cache.layers[0].pair.host.words
    there = torch.empty_like(words, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        there.copy_(words, non_blocking=True)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times) * cache.memory().packed_bytes / words.nbytes


def case(
    model: Any, kv: dict[str, torch.Tensor], batch: int, tokens: int, steps: int, names: list[str]
) -> dict[str, Any]:
    """One line of the table."""
    config, capacity = model.config, tokens + 256
    makers: dict[str, Callable[[], Any]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "GAACCache": GAACCache,
        "StaticCache": lambda: StaticCache(config, max_cache_len=capacity),
        "GAACCache static": lambda: GAACCache(config, max_tokens=capacity),
        "offloaded": lambda: DynamicCache(config=config, offloading=True),
        "GAACCache offloaded": lambda: GAACCache(offload="cpu"),
    }
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    plain = fill(makers["DynamicCache"](), kv, config, batch, tokens)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        other = logits(model, plain, batch)
    plain.crop(-1)
    expected = logits(model, plain, batch)
    row["another kernel's difference"] = difference(other, expected)
    plain.crop(-1)
    for name in [name for name in makers if name.startswith("GAACCache") and name in names]:
        cache = fill(makers[name](), kv, config, batch, tokens)
        check_same(plain, cache)
        row[f"{name} logit error"] = difference(logits(model, cache, batch), expected)
        memory = cache.memory()
        row[f"{name} ratio"] = memory.ratio
        weights = sum(p.nbytes for p in model.parameters())
        if name == "GAACCache offloaded":
            row["link"] = link_time(cache)
        row["limit"] = (weights + memory.total_bytes) / READ_BYTES_PER_SECOND * 1e3
        del cache
    del plain
    for name in names:
        torch._dynamo.reset()  # sizes are not to become dynamic from one case to the next
        gc.collect()
        torch.cuda.empty_cache()
        cache = fill(makers[name](), kv, config, batch, tokens)
        count = WARM_UP + (8 if name.endswith("offloaded") else steps)
        begin = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        times = generate(model, cache, batch, tokens, count)
        row[name] = statistics.median(times[WARM_UP:])
        row[f"{name} all"] = [round(t, 2) for t in times]
        row[f"{name} peak GiB"] = (torch.cuda.max_memory_allocated() - held) / 2**30
        row[f"{name} seconds"] = time.perf_counter() - begin
        if name.startswith("GAACCache"):
            more = partial(generate, model, cache, batch, tokens + count + 1, 4)
            calls = fused_calls(more)
            # One token more than steps: the first one is a prompt to `generate`.
            if calls != 5 * config.num_hidden_layers:
                raise NotExactError(f"{name}: {calls} fused calls in 5 steps of all layers")
            row[f"{name} fused calls in 5 steps"] = calls
        del cache
        print(f"{batch} x {tokens} {name}: {row[name]:.2f} ms", flush=True)
    peers = [row[name] for name in PEERS if name in row and name != "offloaded"]
    if peers and "GAACCache static" in row:
        row["factor"] = min(peers) / row["GAACCache static"]
    return row


def main() -> None:
    parser = argument_parser(__doc__, "decode")
    parser.add_argument("--kv", type=Path, required=True, help="captured keys and values")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--cases", nargs="*", help="such as 1x8192 4x65536 (default: all)")
    parser.add_argument("--caches", nargs="*", help="names of caches (default: all)")
    args = parser.parse_args()
    names = args.caches or [
        "DynamicCache", "GAACCache", "StaticCache", "GAACCache static", "offloaded",
        "GAACCache offloaded",
    ]  # fmt: skip
    cases = [tuple(map(int, c.split("x"))) for c in args.cases] if args.cases else CASES
    kv, model, rows = load_file(args.kv), llama_8b(), []
    env = environment("Llama-3.1-8B shape") | {"gpu": torch.cuda.get_device_name()}
    for batch, tokens in cases:
        rows.append(case(model, kv, batch, tokens, args.steps, names))
        write_results(args.out, env, rows)
    shown = ["batch", "tokens", *names, "factor", "limit", "link"]
    print_table("Milliseconds per decode step", rows, {name: name for name in shown})


if __name__ == "__main__":
    main()
