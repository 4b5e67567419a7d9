"""Verified reuse: when the first provisional and the first verified token come, and how many of the
drafts are accepted.

    OMP_NUM_THREADS=1 python benchmarks/reuse_verified.py --clock process   # about 4 minutes

Moved documents as in ``reuse.py``, whose result file gets one more line per length. Times are from
the call of ``generate``. ``full`` is a fresh DynamicCache; every text must be its text.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from common import (
    NotExactError,
    argument_parser,
    environment,
    load_tokenizer,
    model_path,
    print_environment,
    write_results,
)
from reuse import CLOCKS, Timer
from reuse_prompts import Case, Passages, moved_cases
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_kvcodecs import ChunkReuseCache, ChunkStore, draft_verify
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT


class Moments(BaseStreamer):
    """When tokens came; the first entry is the prompt's."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(self.timer.clock())

    def end(self) -> None:
        pass


def generate(
    timer: Timer, ids: torch.Tensor, cache: Any, new_tokens: int, **options: Any
) -> tuple[torch.Tensor, float, Moments]:
    """The text, when the call began, and when its tokens came."""
    moments = Moments(timer)
    timer.sync()
    began = timer.clock()
    out = timer.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=moments,
        **{CACHE_ARGUMENT: cache},
        **options,
    )
    return out, began, moments


def run_case(timer: Timer, case: Case, draft_length: int, new_tokens: int) -> dict[str, Any]:
    """Times in seconds and counts of one prompt."""
    ids = timer.ids(case.prompt)
    plain, began, moments = generate(timer, ids, DynamicCache(), new_tokens)
    row = {
        "tokens": ids.shape[1],
        "full": moments.at[1] - began,
        "full_all": moments.at[-1] - began,
    }
    store = ChunkStore(max_bytes="64GiB")
    for text in case.seen:
        timer.first_token(timer.ids(text), lambda: ChunkReuseCache(timer.model, store))
    early: list[float] = []
    cache = ChunkReuseCache(
        timer.model,
        store,
        verify=True,
        draft_length=draft_length,
        on_provisional=lambda _: early.append(timer.clock()),
    )
    text, began, moments = generate(timer, ids, cache, new_tokens, custom_generate=draft_verify)
    if not torch.equal(text, plain):
        raise NotExactError(f"verified reuse of {ids.shape[1]} tokens")
    report = cache.report()
    return row | {
        "first": early[0] - began,
        "drafted": early[-1] - began,
        "verified": moments.at[1] - began,
        "all": moments.at[-1] - began,
        "provisional": report.provisional_tokens,
        "accepted": report.accepted_tokens,
    }


def measure(args: Any, timer: Timer) -> Iterator[dict[str, Any]]:
    """A line for each length."""
    passages = Passages(timer.tokenizer)
    for tokens in args.tokens:
        cases = list(moved_cases(passages, tokens, args.count + 1))
        rows = [run_case(timer, case, args.draft_length, args.new_tokens) for case in cases][1:]
        accepted, provisional = (
            sum(row[name] for row in rows) for name in ("accepted", "provisional")
        )
        medians = {
            f"{name}_ms": 1e3 * statistics.median(row[key] for row in rows)
            for name, key in {
                "full": "full",
                "full_all_tokens": "full_all",
                "first_provisional": "first",
                "last_provisional": "drafted",
                "first_verified": "verified",
                "all_tokens": "all",
            }.items()
        }
        yield {
            "case": f"moved document, {tokens} tokens, verify",
            "prompts": len(rows),
            "prompt_tokens": round(statistics.mean(row["tokens"] for row in rows)),
            **medians,
            "speedup": statistics.mean(row["full"] / row["first"] for row in rows),
            "provisional": provisional,
            "accepted": accepted,
            "accepted_share": accepted / provisional,
            "same_texts": len(rows),
            "new_tokens": args.new_tokens,
            "draft_length": args.draft_length,
            "shape": "smollm2",
            "dtype": "fp32",
            "device": "cpu",
            "clock": args.clock,
        }


def main() -> None:
    """Runs the benchmark and adds its lines to the result file."""
    parser = argument_parser(__doc__, "reuse")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--count", type=int, default=4, help="prompts, one more to warm up")
    parser.add_argument("--draft-length", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    args = parser.parse_args()
    path = model_path(args)
    env = environment(path)
    print_environment(env)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    timer = Timer(model, load_tokenizer(path), args.clock)
    old = args.out.read_text() if args.out.exists() else ""
    lines = []
    for line in measure(args, timer):
        print(line, flush=True)
        lines.append(line)
    write_results(args.out, env, lines)
    args.out.write_text(old + args.out.read_text())


if __name__ == "__main__":
    main()
