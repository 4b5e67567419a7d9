"""The command line: ``hf-kvcodecs demo``, ``store`` and ``plan``."""

from __future__ import annotations

import argparse
import inspect
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import __version__

PREFILL_CHUNK_TOKENS = 512


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-kvcodecs", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hf_kvcodecs {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="the same tokens from DynamicCache and GAACCache, and what each takes"
    )
    demo.add_argument(
        "--model", help="a hub name or a folder (default: SmolLM2-135M-Instruct from its package)"
    )
    demo.add_argument(
        "--tokens", type=_positive, default=3000, help="prompt length (default %(default)s)"
    )
    demo.add_argument(
        "--new-tokens", type=_positive, default=48, help="tokens to generate (default %(default)s)"
    )
    demo.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    demo.set_defaults(run=run_demo)
    store = commands.add_parser("store", help="what a chunk store's folder holds")
    store.add_argument("folder", help="the folder given as ChunkStore(disk=...)")
    store.add_argument("--verify", action="store_true", help="read every file, remove damaged ones")
    store.add_argument("--clear", action="store_true", help="remove every chunk")
    store.set_defaults(run=run_store)
    add_plan(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except (OSError, ValueError, ImportError) as error:
        print(f"hf-kvcodecs: {error}", file=sys.stderr)
        return 2


def add_plan(commands: Any) -> None:
    """The arguments of ``plan``; gigabytes are 10**9 bytes."""
    parser = commands.add_parser(
        "plan", help="tokens per second of drafting on a compressed cache, by arithmetic"
    )
    numbers = {
        "weights": (16.0, "GB of the model's weights"),
        "kv": (8.6, "GB of one request's full KV cache"),
        "ratio": (0.2, "bytes of the draft cache by those of the full one"),
        "accepted": (12.0, "drafted tokens accepted on average"),
        "memory-bandwidth": (4300.0, "GB/s of the accelerator's memory"),
        "link-bandwidth": (55.0, "GB/s between host and accelerator"),
        "capacity": (141.0, "GB of the accelerator's memory"),
        "link-ratio": (1.0, "bytes over the link by those of the full cache: 0.71 when packed"),
    }
    for name, (value, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=float, default=value, help=f"{text} (default %(default)s)"
        )
    for name, count, text in (
        ("draft-length", 25, "tokens drafted before a verification"),
        ("batch", 1, "requests"),
    ):
        parser.add_argument(
            f"--{name}", type=_positive, default=count, help=f"{text} (default %(default)s)"
        )
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Prints what follows from the numbers given."""
    from rich.console import Console
    from rich.table import Table

    from .generation.planner import plan

    made = plan(
        weight_bytes=options.weights * 1e9,
        kv_bytes=options.kv * 1e9,
        ratio=options.ratio,
        draft_length=options.draft_length,
        accepted=options.accepted,
        batch=options.batch,
        memory_bandwidth=options.memory_bandwidth * 1e9,
        link_bandwidth=options.link_bandwidth * 1e9,
        capacity_bytes=options.capacity * 1e9,
        link_ratio=options.link_ratio,
    )
    table = Table("", "", title="Long-context decoding, verifications staggered")
    rows = {
        "memory reads per iteration": f"{made.memory_bytes_read / 1e9:.1f} GB",
        "these take": f"{made.memory_seconds * 1e3:.1f} ms",
        "link bytes per iteration": f"{made.link_bytes / 1e9:.2f} GB",
        "those take": f"{made.link_seconds * 1e3:.1f} ms",
        "bound by": made.bound,
        "tokens per forward of a request": f"{made.tokens_per_iteration:.3f}",
        "tokens/s, all requests": f"{made.throughput:.0f}",
        "tokens/s, the link's limit": f"{made.link_limit:.0f}",
        "link binds below a ratio of": f"{made.critical_ratio:.3f}",
        "peak memory, staggered": f"{made.peak_bytes / 1e9:.1f} GB",
        "peak memory, in lock-step": f"{made.lockstep_peak_bytes / 1e9:.1f} GB",
        "full cache instead: batch that fits": f"{made.plain_batch}",
        "full cache instead: tokens/s": f"{made.plain_throughput or 0:.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {value}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One generation: its cache, its tokens, and the seconds of each decode step."""

    cache: Any
    tokens: Any
    step_seconds: list[float]

    @property
    def step_ms(self) -> float:
        return 1000 * statistics.median(self.step_seconds)


class _StepClock:
    """A streamer that notes when each token came and moves a progress bar."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.times = bar, [time.perf_counter()]

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.bar.update(1)

    def end(self) -> None:
        self.bar.close()


def run_demo(options: argparse.Namespace) -> int:
    """Loads a model, lets it continue real code with both caches, prints the comparison; 1 if they
    differ."""
    import torch
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.utils import logging

    from .caches.gaac import GAACCache
    from .integrations.default_model import default_model

    console = Console()
    logging.disable_progress_bar()
    console.print("Loading the model (the default one is converted once, at the first use) ...")
    name = options.model or str(default_model())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, options.dtype), device_map=_device_map()
    )
    ids = code_prompt(tokenizer, options.tokens).to(model.device)
    console.print(
        f"[bold]{name.rstrip('/').split('/')[-1]}[/] in {options.dtype} on {model.device} reads "
        f"{ids.shape[1]} "
        "tokens of real code (Python's argparse.py) and is asked what it does."
    )
    runs = {
        "DynamicCache": _generate(
            model, ids, DynamicCache(config=model.config), "DynamicCache", options.new_tokens
        ),
        "GAACCache": _generate(
            model, ids, GAACCache(config=model.config), "GAACCache", options.new_tokens
        ),
    }
    return _print_comparison(console, runs, tokenizer, ids.shape[1])


def run_store(options: argparse.Namespace) -> int:
    """Prints the chunks of each model in a folder; 1 if a damaged one was found."""
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from .store.files import checked_chunk
    from .store.tiers import SPACE, DiskTier

    if not Path(options.folder).is_dir():
        raise FileNotFoundError(f"{options.folder}: no such folder")
    tier, console = DiskTier(options.folder), Console()
    table = Table("model and namespace", "chunks", "tokens", "MiB", "damaged", title="Chunk store")
    damaged = 0
    for space in sorted(path.name for path in tier.folder.iterdir() if SPACE.fullmatch(path.name)):
        sizes, bad = [], 0
        for name in sorted(tier.names(space)):
            data = tier.read(space, name) or b""
            tokens = checked_chunk(data, whole=options.verify)
            if tokens is None:
                bad += 1
                if options.verify:
                    tier.remove(space, name)
            else:
                sizes.append((tokens, len(data)))
        tokens, nbytes = (sum(column) for column in zip((0, 0), *sizes, strict=True))
        table.add_row(space[:12], f"{len(sizes)}", f"{tokens}", f"{nbytes / 2**20:.1f}", f"{bad}")
        damaged += bad
    console.print(table)
    if options.clear:
        tier.clear()
        console.print("Every chunk was removed.")
    return 1 if damaged else 0


def code_prompt(tokenizer: Any, tokens: int) -> Any:
    """Token ids ``[1, about tokens]``: the beginning of argparse.py and, for chat models, a
    question about it."""
    source = tokenizer(inspect.getsource(argparse), return_tensors="pt").input_ids[:, :tokens]
    if tokenizer.chat_template is None:
        return source
    question = (
        f"{tokenizer.decode(source[0])}\n\nWhat is this Python module for? Answer in two sentences."
    )
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def _device_map() -> str | None:
    """The GPU where there is one: device_map wants accelerate, which plain CPUs need not have."""
    import torch

    return "auto" if torch.accelerator.is_available() else None


def _generate(model: Any, ids: Any, cache: Any, label: str, new_tokens: int) -> Run:
    """Reads the prompt in pieces and writes ``new_tokens`` greedy tokens, with a progress bar for
    each part."""
    import torch
    from tqdm.auto import tqdm

    from .caches.compat import CACHE_ARGUMENT

    with (
        torch.inference_mode(),
        tqdm(total=ids.shape[1], desc=f"{label}: prompt", unit="token", leave=False) as bar,
    ):
        for piece in ids[:, :-1].split(PREFILL_CHUNK_TOKENS, dim=1):
            model(piece, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            bar.update(piece.shape[1])
    clock = _StepClock(
        tqdm(total=new_tokens, desc=f"{label}: new tokens", unit="token", leave=False)
    )
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
        pad_token_id=0,
        **{CACHE_ARGUMENT: cache},
    )
    # The streamer is first given the prompt; the first new token also pays for what is set up once.
    times = clock.times[2:]
    return Run(
        cache=cache,
        tokens=tokens,
        step_seconds=[b - a for a, b in itertools.pairwise(times)] or [0],
    )


def _print_comparison(
    console: Any, runs: dict[str, Run], tokenizer: Any, prompt_tokens: int
) -> int:
    import torch
    from rich.markup import escape
    from rich.table import Table

    from .caches.compat import CACHE_ARGUMENT

    dense, packed = runs["DynamicCache"], runs["GAACCache"]
    same = torch.equal(dense.tokens, packed.tokens)
    report = packed.cache.memory()
    table = Table(
        "", "DynamicCache", "GAACCache", title="The same model, the same prompt, two caches"
    )
    table.add_row("tokens identical", "", "[green]yes[/]" if same else "[red]no[/]")
    table.add_row(
        "KV held", f"{report.dense_bytes / 2**20:.1f} MiB", f"{report.total_bytes / 2**20:.1f} MiB"
    )
    table.add_row("times smaller", "1.00", f"[bold]{report.factor:.2f}[/]")
    bits = 8 * dense.cache.layers[-1].keys.element_size()
    table.add_row(
        "bits per number (packed blocks)", f"{bits:.2f}", f"{report.bits_per_element:.2f}"
    )
    table.add_row("time per step (median)", f"{dense.step_ms:.1f} ms", f"{packed.step_ms:.1f} ms")
    console.print(table)
    text = tokenizer.decode(packed.tokens[0, prompt_tokens:], skip_special_tokens=True)
    console.print("Both wrote:" if same else "GAACCache wrote:", escape(repr(text)))
    console.print(f"In your code: [bold]model.generate(**inputs, {CACHE_ARGUMENT}=GAACCache())[/]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
