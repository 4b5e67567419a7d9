"""Is a decode step slower than ``DynamicCache``'s on a CPU, and what does it hold at most?

    python benchmarks/decode_cpu.py                              # time, every context and dtype
    python benchmarks/decode_cpu.py --memory                     # peak bytes, the longest context
    python benchmarks/decode_cpu.py --contexts 512 --dtype bf16 --out small.jsonl

Both caches hold the same real prefill of code, compared bit by bit, and take turns step by step
(A B A B) in one process; a step's token is removed again, so that the length stays and no block is
sealed. A step that seals a block is timed on its own: one step in 128 is such a step. Times are
medians with the 20th and 80th percentile; a ratio above 1 means that ``GAACCache`` is slower. Run
it on an idle machine: another process on the same cores slows some steps tenfold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import decode_memory
import texts
import torch
from decode_steps import Step, cache_step, model_step, prefix, undo
from transformers import DynamicCache

from hf_kvcodecs import GAACCache

BLOCK_TOKENS = 128
CONTEXTS = [512, 1024, 2048, 4096, 8192]
HEADERS = {
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
    caches: dict[str, Any] = {"dynamic": plain, "gaac": GAACCache.from_cache(plain)}
    common.check_same(plain, caches["gaac"])
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
        steps = {"model": model_step(model, ids[:, -1:]), "cache alone": cache_step(full)}
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
            rows.append({"what": what, "seconds": float(done.stdout)})
    return rows


def run_time(args: argparse.Namespace, path: str, source: str) -> list[dict[str, Any]]:
    """Times everything and prints it."""
    rows = time_rows(args, path, source)
    for what in ("model", "cache alone"):
        chosen = [row for row in rows if row["what"] == what]
        common.print_table(f"One decode step in ms, {what}", chosen, HEADERS)
    first = first_use_rows()
    common.print_table("First use of a packed cache in a process", first)
    return rows + [{"case": "first use", **row} for row in first]


def run_memory(args: argparse.Namespace, path: str, source: str) -> list[dict[str, Any]]:
    """Measures the peaks at the longest context and prints them."""
    rows = decode_memory.memory_rows(path, args.dtype, source, max(args.contexts))
    title = (
        f"Most MiB held during {decode_memory.STEPS} decode steps at {max(args.contexts)} tokens"
    )
    common.print_table(title, rows, decode_memory.HEADERS)
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    name = "decode_memory" if "--memory" in sys.argv else "decode_cpu"
    parser = common.argument_parser(__doc__, name)
    add = parser.add_argument
    add("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens held, at least 128")
    add("--dtype", nargs="+", choices=list(common.DTYPES), default=["bf16", "fp32"])
    add("--steps", type=int, default=21, help="timed steps per cache (21)")
    add("--warmup", type=int, default=3, help="untimed steps before them (3)")
    add("--memory", action="store_true", help="peak bytes instead of time")
    add("--first-use", action="store_true", help="only print the first use's cost in seconds")
    args = parser.parse_args()
    if min(args.contexts) < BLOCK_TOKENS:
        parser.error(f"--contexts: at least {BLOCK_TOKENS} tokens, so that a block is packed")
    return args


def main() -> int:
    """Runs what was asked for, prints and writes it; returns the exit status."""
    args = parse_args()
    if args.first_use:
        print(first_use())
        return 0
    path, source = common.model_path(args), texts.code_text()
    load = os.getloadavg()[0]  # of the minute before
    env = common.environment(path) | {"code_digest": texts.digest(source), "load_before": load}
    common.print_environment(env)
    print(f"code {env['code_digest']}, load average before {load:.2f}", flush=True)
    try:
        rows = (run_memory if args.memory else run_time)(args, path, source)
    except common.NotExactError as error:
        print(f"not bit-exact: {error}", file=sys.stderr)
        return 2
    common.write_results(args.out, env, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
