"""Is a decode step slower than ``DynamicCache``'s on a CPU, and what does it allocate?

    python benchmarks/decode_cpu.py                              # time, every context and dtype
    python benchmarks/decode_cpu.py --memory                     # peak bytes while decoding at 8K
    python benchmarks/decode_cpu.py --contexts 512 --dtype bf16 --out /tmp/small.jsonl

Both caches hold the same real prefill of code and take turns step by step (A B A B) in one process;
a step's token is removed again, so that the length stays and no block is sealed. A step that seals
a block is timed on its own: one step in 128 is such a step. Times are medians with the 20th and
80th percentile in milliseconds; a ratio above 1 means that ``GAACCache`` is slower.

``--memory`` adds up the profiler's allocations and frees in order. The bound is what the cache
holds and one dense layer (its keys and values) more; decoding with the cache alone, and with the
model and hardly any cache, tells apart what each of the two allocates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import texts
import torch
from peak_memory import peak_of
from transformers import DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.caches.report import measure
from hf_kvcodecs.caches.view import KVView

Step = Callable[[Any], Any]  # one decode step, given the cache
BLOCK_TOKENS = 128
MEMORY_CONTEXT = 8192
MEMORY_STEPS = 3
TIME_HEADERS = {
    "dtype": "dtype",
    "context": "context",
    "dynamic_ms": "DynamicCache",
    "dynamic_p20_ms": "p20",
    "dynamic_p80_ms": "p80",
    "gaac_ms": "GAACCache",
    "gaac_p20_ms": "p20",
    "gaac_p80_ms": "p80",
    "ratio": "ratio",
    "seal_ms": "sealing step",
    "ratio_with_seals": "ratio with seals",
    "gaac_first_ms": "first step",
}
MEMORY_HEADERS = {
    "dtype": "dtype",
    "what": "what",
    "held_MiB": "held",
    "peak_MiB": "peak",
    "bound_MiB": "bound",
    "on_top_MiB": "on top",
    "on_top_in_dense_layers": "in dense layers",
    "new_at_peak_MiB": "allocated since, held at the peak",
}


def model_step(model: Any, token: torch.Tensor) -> Step:
    """A step of the whole model, with ``token`` ``[1, 1]`` as its input."""

    def step(cache: Any) -> None:
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})

    return step


def cache_step(model: Any, dtype: str) -> Step:
    """A step of the cache alone: every layer takes one token and yields dense keys and values."""
    config = model.config
    states = torch.randn(1, config.num_key_value_heads, 1, config.head_dim)
    states = states.to(common.DTYPES[dtype])

    def layer_step(cache: Any, idx: int) -> None:  # its views die on return, as in attention
        for tensor in cache.update(states, states, idx):
            if isinstance(tensor, KVView):
                tensor.dense()

    def step(cache: Any) -> None:
        for idx in range(config.num_hidden_layers):
            layer_step(cache, idx)

    return step


def prefix(cache: DynamicCache, tokens: int) -> DynamicCache:
    """A copy of the first ``tokens`` tokens: what a prefill of just these would have left."""
    copy = DynamicCache()
    for idx, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), idx)
    return copy


def undo(cache: Any) -> None:
    """Removes the step's token again."""
    cache.crop(-1)
    for layer in cache.layers:
        if not hasattr(layer, "pair"):
            # A crop leaves DynamicCache views that skip a row per head; decoding never sees such.
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()


@torch.inference_mode()
def timed(step: Step, caches: dict[str, Any], count: int, warmup: int) -> dict[str, list[float]]:
    """Milliseconds of each step per cache, warm-up first; the caches take turns."""
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(warmup + count):
        for name, cache in caches.items():
            start = time.perf_counter()
            step(cache)
            times[name].append(1e3 * (time.perf_counter() - start))
            undo(cache)
    return times


def spread(name: str, times: list[float]) -> dict[str, float]:
    """The median with the 20th and 80th percentile."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    middle = statistics.median(times)
    return {f"{name}_ms": middle, f"{name}_p20_ms": fifths[0], f"{name}_p80_ms": fifths[-1]}


def time_row(
    step: Step, full: DynamicCache, tokens: int, count: int, warmup: int
) -> dict[str, float]:
    """One context: both caches in turn, then steps that seal a block each."""
    plain = prefix(full, tokens)
    caches = {"dynamic": plain, "gaac": GAACCache.from_cache(plain)}
    times = timed(step, caches, count, warmup)
    before_seal = GAACCache.from_cache(prefix(full, tokens - tokens % BLOCK_TOKENS - 1))
    seals = timed(step, {"seal": before_seal}, max(count // 3, 3), 1)["seal"][1:]
    row = spread("dynamic", times["dynamic"][warmup:]) | spread("gaac", times["gaac"][warmup:])
    seal = statistics.median(seals)
    mean = row["gaac_ms"] + (seal - row["gaac_ms"]) / BLOCK_TOKENS
    return row | {
        "ratio": row["gaac_ms"] / row["dynamic_ms"],
        "seal_ms": seal,
        "ratio_with_seals": mean / row["dynamic_ms"],
        "gaac_first_ms": times["gaac"][0],
    }


def time_rows(args: argparse.Namespace, path: str, source: str) -> list[dict[str, Any]]:
    """Every dtype and context: the whole model, then the cache alone."""
    tokenizer = common.load_tokenizer(path)
    ids = common.token_ids(tokenizer, source, max(args.contexts) + 1)
    rows = []
    for dtype in args.dtype:
        model = common.load_model(path, dtype)
        full = common.prefill(model, DynamicCache(), ids[:, :-1])
        steps = {"model": model_step(model, ids[:, -1:]), "cache alone": cache_step(model, dtype)}
        for tokens in args.contexts:
            for what, step in steps.items():
                case = {"what": what, "dtype": dtype, "context": tokens}
                rows.append(case | time_row(step, full, tokens, args.steps, args.warmup))
    return rows


def first_use() -> float:
    """Seconds that the first decoding in this process takes longer than the second."""
    cache = GAACCache()
    states = torch.randn(1, 3, 1024, 64, dtype=torch.bfloat16)
    cache.update(states, states, 0)
    seconds = []
    for _ in range(2):
        view = cache.update(states[:, :, :1], states[:, :, :1], 0)[0]
        start = time.perf_counter()
        view.dense()
        seconds.append(time.perf_counter() - start)
    return seconds[0] - seconds[1]


def first_use_rows() -> list[dict[str, Any]]:
    """First use in a fresh process: with nothing compiled yet, then with Inductor's disk cache."""
    command = [sys.executable, str(Path(__file__)), "--first-use"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        for what in ("nothing compiled yet", "compiled by an earlier process"):
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            rows.append({"first_use": what, "seconds": float(done.stdout)})
    return rows


@torch.inference_mode()
def memory_row(what: str, step: Step, make: Callable[[], Any], layer_bytes: int) -> dict[str, Any]:
    """Peak bytes of a few steps with the cache that ``make`` makes, which count as well.

    Args:
        what: names the case.
        step: the step.
        make: makes the filled cache.
        layer_bytes: dense keys and values of one layer.
    """
    step(make())  # what is compiled or set up once is no part of it

    def decode(cache: Any) -> None:
        for _ in range(MEMORY_STEPS):
            step(cache)

    peak = peak_of(make, decode)
    new = {op: size / 2**20 for op, size in peak.by_operation.items()}
    return {
        "what": what,
        "reported_MiB": measure(make().layers).total_bytes / 2**20,
        "held_MiB": peak.before / 2**20,
        "peak_MiB": peak.bytes / 2**20,
        "bound_MiB": (peak.before + layer_bytes) / 2**20,
        "on_top_MiB": (peak.bytes - peak.before) / 2**20,
        "on_top_in_dense_layers": (peak.bytes - peak.before) / layer_bytes,
        "new_at_peak_MiB": {op: size for op, size in new.items() if size >= 0.01},
    }


def memory_rows(args: argparse.Namespace, path: str, source: str) -> list[dict[str, Any]]:
    """Both caches alone and within the model, and the model with hardly any cache."""
    tokenizer = common.load_tokenizer(path)
    context = min(max(args.contexts), MEMORY_CONTEXT)
    ids = common.token_ids(tokenizer, source, context + 1)
    rows = []
    for dtype in args.dtype:
        model = common.load_model(path, dtype)
        full = common.prefill(model, DynamicCache(), ids[:, :-1])
        layer_bytes = measure(full.layers).total_bytes // len(full.layers)
        alone, within = cache_step(model, dtype), model_step(model, ids[:, -1:])
        plain, packed = partial(prefix, full, context), partial(GAACCache.from_cache, full)
        cases = {
            "DynamicCache alone": (alone, plain),
            "GAACCache alone": (alone, packed),
            "DynamicCache in the model": (within, plain),
            "GAACCache in the model": (within, packed),
            "model, 16 tokens in DynamicCache": (within, partial(prefix, full, 16)),
        }
        for what, (step, make) in cases.items():
            rows.append({"dtype": dtype} | memory_row(what, step, make, layer_bytes))
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = common.argument_parser(__doc__, "decode_cpu")
    contexts = [512, 1024, 2048, 4096, 8192]
    parser.add_argument("--contexts", nargs="+", type=int, default=contexts, help="tokens held")
    parser.add_argument("--dtype", nargs="+", choices=list(common.DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=21, help="timed steps per cache (21)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before them (3)")
    parser.add_argument("--memory", action="store_true", help="peak bytes instead of time")
    parser.add_argument("--first-use", action="store_true", help="only print the first use's cost")
    return parser.parse_args()


def main() -> int:
    """Runs what was asked for, prints and writes it."""
    args = parse_args()
    if args.first_use:
        print(first_use())
        return 0
    path, source = common.model_path(args), texts.code_text()
    load = os.getloadavg()[0]  # of the minute before: timings beside other work mean little
    env = common.environment(path) | {"code_digest": texts.digest(source), "load_before": load}
    common.print_environment(env)
    print(f"code {env['code_digest']}, load average before {load:.2f}", flush=True)
    if args.memory:
        rows = memory_rows(args, path, source)
        title = f"Most MiB held during {MEMORY_STEPS} decode steps"
        common.print_table(title, rows, MEMORY_HEADERS)
        args.out = args.out.with_name(args.out.name.replace("decode_cpu", "decode_cpu_memory"))
    else:
        rows = time_rows(args, path, source)
        for what in ("model", "cache alone"):
            chosen = [row for row in rows if row["what"] == what]
            common.print_table(f"One decode step in ms, {what}", chosen, TIME_HEADERS)
        first = first_use_rows()
        common.print_table("First use of a packed cache in a process", first)
        rows += first
    common.write_results(args.out, env, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
