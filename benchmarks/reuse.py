"""Time to the first token with and without reuse, and how far the answer is from full prefill.

    python benchmarks/reuse.py                            # SmolLM2 on the CPU, about 15 minutes
    python benchmarks/reuse.py --tokens 1024 --count 4 --workloads moved
    python benchmarks/reuse.py --rho --rest               # repairs, codecs at rest
    python benchmarks/reuse.py --device cuda --dtype bf16 --shape 8b --workloads moved \
        --tokens 16384 32768 65536
    python benchmarks/reuse.py --device cuda --dtype bf16 --shape deep --workloads moved \
        --tokens 4096 16384

Every time is from the call of ``generate`` to the first token: lookup, loading, moving, repair and
storing what is new are in it. ``full`` is a fresh DynamicCache; ``prefix`` a deepcopy of a
DynamicCache that holds the shared beginning (where there is one). KL is of the first token's
distribution against full's. Where kvboost 0.9.0 is installed, it runs on the same prompts, in its
own defaults, timed alike. ``--clock process`` counts the processor's time instead of the wall's,
which other work on the machine does not stretch: for one thread.

``--shape 8b`` has Llama-3.1-8B's shape and random weights: its times mean something, its KL does
not; of ``--model`` only the tokenizer is read. ``--shape deep`` is SmolLM2 with layers that add
nothing to the residual stream: real behaviour, more cost; YaRN carries it beyond 8K tokens.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import (
    DTYPES,
    argument_parser,
    environment,
    load_tokenizer,
    model_path,
    print_environment,
    print_table,
    write_results,
)
from reuse_prompts import WORKLOADS, Case, Passages, question
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcodecs import ChunkReuseCache, ChunkStore
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

Logits = torch.Tensor
DEFAULT: dict[str, Any] = {}  # the one default setting: what the headline figures are measured with
REPAIRS: dict[str, dict[str, Any]] = {
    "none": {"repair": "none"},
    "selective (default)": DEFAULT,
    "cacheblend 5 %": {"repair": "cacheblend", "recompute_ratio": 0.05},
    "cacheblend 15 %": {"repair": "cacheblend", "recompute_ratio": 0.15},
    "cacheblend 30 %": {"repair": "cacheblend", "recompute_ratio": 0.30},
    "cacheblend 100 %": {"repair": "cacheblend", "recompute_ratio": 1.0},
}
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "max_position_embeddings": 131072, "vocab_size": 49152,
           "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 8192}}  # fmt: skip
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
ASIDE = 200  # tokens of a prompt beside its documents, at most


def load(args: Namespace) -> Any:
    """The model that the command line asks for."""
    dtype = DTYPES[args.dtype]
    if args.shape == "8b":
        torch.set_default_dtype(dtype)
        with torch.device(args.device):
            model = LlamaForCausalLM(LlamaConfig(**EIGHT_B))
        torch.set_default_dtype(torch.float32)
        return model.eval()
    model = AutoModelForCausalLM.from_pretrained(model_path(args), dtype=dtype).to(args.device)
    if args.shape == "deep":
        deepen(model, args.layers)
    if (longest := max(args.tokens) + ASIDE) > model.config.max_position_embeddings:
        stretch(model, longest)
    return model.eval()


def deepen(model: Any, layers: int) -> None:
    """Puts layers behind each layer that cost what it costs and add nothing to the residual
    stream, ``layers`` in all."""
    stack = list(model.model.layers)
    copies = layers // len(stack)
    deep = torch.nn.ModuleList()
    for layer in stack:
        deep.append(layer)
        for _ in range(copies - 1):
            idle = copy.deepcopy(layer)
            torch.nn.init.zeros_(idle.self_attn.o_proj.weight)
            torch.nn.init.zeros_(idle.mlp.down_proj.weight)
            deep.append(idle)
    for idx, layer in enumerate(deep):
        layer.self_attn.layer_idx = idx
    model.model.layers = deep
    model.config.num_hidden_layers = len(deep)


def stretch(model: Any, tokens: int) -> None:
    """YaRN for prompts beyond the trained context; the weights stay."""
    config = model.config
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": float(-(-tokens // config.max_position_embeddings)),
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    config.max_position_embeddings = tokens
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(rotary.inv_freq.device)


class Timer:
    """First tokens of one model, timed by ``clock``."""

    def __init__(self, model: Any, tokenizer: Any, clock: str = "wall") -> None:
        self.model, self.tokenizer = model, tokenizer
        self.clock = CLOCKS[clock]

    def ids(self, text: str) -> torch.Tensor:
        encoded: torch.Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        return encoded.to(self.model.device)

    def sync(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def first_token(
        self, ids: torch.Tensor, make_cache: Callable[[], Any]
    ) -> tuple[float, Logits, Any]:
        """Seconds from the call to the first token, its logits, the cache."""
        self.sync()
        began = self.clock()
        cache = make_cache()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
            **{CACHE_ARGUMENT: cache},
        )
        self.sync()
        return self.clock() - began, out.logits[0][0], cache


def divergence(expected: Logits, got: Logits) -> float:
    """KL(expected || got) of the first token, in nats."""
    p, q = (x.double().log_softmax(-1) for x in (expected, got))
    return max(float((p.exp() * (p - q)).sum()), 0.0)


def run_case(
    timer: Timer, case: Case, settings: dict[str, Any], peers: list[Peer]
) -> dict[str, Any]:
    """Every contender on one prompt; times in seconds, KL and agreement against full."""
    model, ids = timer.model, timer.ids(case.prompt)
    full_seconds, expected = timer.first_token(ids, DynamicCache)[:2]
    row: dict[str, Any] = {"tokens": ids.shape[1], "full": full_seconds, "expected": expected}
    store = ChunkStore(max_bytes="64GiB", codec=settings.get("codec"))
    options = {k: v for k, v in settings.items() if k != "codec"}
    for text in case.seen:
        timer.first_token(timer.ids(text), lambda: ChunkReuseCache(model, store))
    held = shared_beginning(timer, case, ids) if case.workload == "warm prefix" else None
    plain = [timer.first_token(ids, lambda: copy.deepcopy(held))[:2]] if held is not None else []
    seconds, logits, cache = timer.first_token(
        ids, lambda: ChunkReuseCache(model, store, **options)
    )
    row |= {"ours": seconds, "report": cache.report(), "kl": divergence(expected, logits)}
    del cache
    row |= {"agree": int(logits.argmax()) == int(expected.argmax()), "store": store.stats().bytes}
    if held is not None:  # before and after, since whoever comes later finds memory ready
        plain += [timer.first_token(ids, lambda: copy.deepcopy(held))[:2]]
        row["prefix"] = statistics.mean(seconds for seconds, _ in plain)
        row["prefix_same"] = all(torch.equal(other, logits) for _, other in plain)
    for peer in peers:
        row[peer.name] = peer.run(case, expected)
    gc.collect()
    return row


def shared_beginning(timer: Timer, case: Case, ids: torch.Tensor) -> DynamicCache:
    """A DynamicCache that has read what ``ids`` and the text seen before begin with."""
    held, seen = DynamicCache(), timer.ids(case.seen[0])
    timer.first_token(seen, lambda: held)
    length = min(ids.shape[1], held.get_seq_length())
    shared = int((ids[0, :length] == seen[0, :length]).long().cumprod(0).sum())
    held.crop(shared - held.get_seq_length())
    return held


class Peer:
    """kvboost in its own defaults, or with its cacheblend."""

    def __init__(self, timer: Timer, strategy: str) -> None:
        self.timer, self.strategy, self.name = timer, strategy, f"kvboost {strategy}"

    def run(self, case: Case, expected: Logits) -> dict[str, Any]:
        """Seconds, reuse and KL on one prompt, with an engine that has seen what the store has."""
        from kvboost import KVBoost

        engine = KVBoost(
            self.timer.model,
            self.timer.tokenizer,
            max_cache_bytes=64 * 2**30,
            max_chunks=10_000,
            recompute_strategy=self.strategy,
            device=str(self.timer.model.device),
        )
        for text in case.seen:
            engine.generate(text, max_new_tokens=1)
        self.timer.sync()
        times = [self.timer.clock()]
        result = engine.generate(
            case.prompt, max_new_tokens=1, on_token=lambda _: times.append(self.timer.clock())
        )
        seconds = times[1] - times[0]
        logits = result.first_token_logits
        kl = None if logits is None else divergence(expected.cpu(), torch.as_tensor(logits))
        return {"seconds": seconds, "reuse": result.kv_reuse_ratio, "kl": kl}


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of results: medians of times, means of ratios and divergences."""
    reports = [row["report"] for row in rows]
    line: dict[str, Any] = {
        "case": name,
        "prompts": len(rows),
        "prompt_tokens": round(statistics.mean(row["tokens"] for row in rows)),
        "full_ms": 1e3 * statistics.median(row["full"] for row in rows),
        "ours_ms": 1e3 * statistics.median(row["ours"] for row in rows),
        "speedup": statistics.mean(row["full"] / row["ours"] for row in rows),
        "mean_kl": statistics.mean(row["kl"] for row in rows),
        "max_kl": max(row["kl"] for row in rows),
        "first_token_agrees": statistics.mean(row["agree"] for row in rows),
        "computed_share": statistics.mean(r.computed_tokens / r.total_tokens for r in reports),
        "lookup_ms": 1e3 * statistics.median(r.lookup_seconds for r in reports),
        "store_mib": statistics.mean(row["store"] for row in rows) / 2**20,
    }
    if "prefix" in rows[0]:
        line["prefix_ms"] = 1e3 * statistics.median(row["prefix"] for row in rows)
        line["over_prefix"] = statistics.mean(row["prefix"] / row["ours"] for row in rows)
        line["same_bits_as_prefix"] = all(row["prefix_same"] for row in rows)
    for peer in (key for key in rows[0] if key.startswith("kvboost")):
        found = [row[peer] for row in rows]
        line[peer] = {
            "ms": 1e3 * statistics.median(f["seconds"] for f in found),
            "over_ours": statistics.mean(
                f["seconds"] / row["ours"] for f, row in zip(found, rows, strict=True)
            ),
            "reuse": statistics.mean(f["reuse"] for f in found),
            "mean_kl": None if found[0]["kl"] is None else statistics.mean(f["kl"] for f in found),
        }
    return line


def chat_rows(timer: Timer, passages: Passages, tokens: int) -> Iterator[dict[str, Any]]:
    """A conversation of eight turns that grows to ``tokens``; from the second turn on."""
    store, text = ChunkStore(max_bytes="64GiB"), ""
    for turn in range(8):
        text += f"{passages.take(tokens // 8 - 40)}\n\n{question(turn)}"
        ids = timer.ids(text)
        full, expected, _ = timer.first_token(ids, DynamicCache)
        ours, logits, cache = timer.first_token(ids, lambda: ChunkReuseCache(timer.model, store))
        if turn:
            yield {"tokens": ids.shape[1], "full": full, "ours": ours, "report": cache.report(),
                   "kl": divergence(expected, logits), "store": store.stats().bytes,
                   "agree": int(logits.argmax()) == int(expected.argmax())}  # fmt: skip
        del cache
        reply = timer.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            pad_token_id=0, **{CACHE_ARGUMENT: ChunkReuseCache(timer.model, store)},
        )  # fmt: skip
        text = timer.tokenizer.decode(reply[0]) + "\n\n"


def measure(args: Namespace, timer: Timer, peers: list[Peer]) -> Iterator[dict[str, Any]]:
    """All lines that the command line asks for, as they are measured."""
    passages, cold = Passages(timer.tokenizer), True
    variants: dict[str, dict[str, Any]] = {"": DEFAULT}
    if args.rho:
        variants = {f", {name}": options for name, options in REPAIRS.items()}
    if args.rest:
        variants |= {f", {codec} at rest": {"codec": codec} for codec in ("gaac", "int8", "int4")}
    for workload in args.workloads:
        for tokens in args.tokens:
            count = max(3, round(args.count * min(1.0, 2048 / tokens)))
            if workload == "chat":
                rows = list(chat_rows(timer, passages, tokens))
                yield report_line(args, f"chat, {tokens} tokens", rows)
                continue
            cases = list(WORKLOADS[workload](passages, tokens, count))
            if cold or args.device == "cuda":  # warm-up; a GPU's kernels depend on the shape
                run_case(timer, cases[0], DEFAULT, peers)
                cold = False
            for name, options in variants.items():
                rows = [run_case(timer, case, options, peers) for case in cases]
                title = f"{cases[0].workload}, {tokens} tokens{name}"
                yield report_line(args, title, rows)


def report_line(args: Namespace, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of results, printed at once."""
    line = {**summary(name, rows), "shape": args.shape, "dtype": args.dtype, "device": args.device,
            "clock": args.clock}  # fmt: skip
    shown = ("case", "full_ms", "ours_ms", "speedup", "mean_kl", "first_token_agrees")
    print({key: line[key] for key in shown}, flush=True)
    return line


def main() -> None:
    """Runs the benchmark and writes one JSON line per case."""
    parser = argument_parser(__doc__, "reuse")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--shape", choices=["smollm2", "8b", "deep"], default="smollm2")
    parser.add_argument("--layers", type=int, default=240, help="of --shape deep")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--count", type=int, default=12, help="prompts (fewer beyond 2K tokens)")
    parser.add_argument(
        "--workloads", nargs="+", choices=[*WORKLOADS, "chat"], default=[*WORKLOADS, "chat"]
    )
    parser.add_argument("--rho", action="store_true", help="every repair, instead of the default")
    parser.add_argument("--rest", action="store_true", help="gaac, int8 and int4 at rest too")
    parser.add_argument("--no-peer", action="store_true", help="leave kvboost out")
    parser.add_argument("--append", action="store_true", help="keep the lines of the result file")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall",
        help="process: processor time, for one thread on a machine that others use too",
    )  # fmt: skip
    args = parser.parse_args()
    path = model_path(args)
    env = environment(path)
    if args.device == "cuda":
        env["gpu"] = torch.cuda.get_device_name()
    print_environment(env)
    timer = Timer(load(args), load_tokenizer(path), args.clock)
    peers = [] if args.no_peer else find_peers(timer)
    old = args.out.read_text() if args.append and args.out.exists() else ""
    lines = []
    for line in measure(args, timer, peers):
        lines.append(line)
        write_results(args.out, env, lines)  # after each, so that a run cut short is not lost
        args.out.write_text(old + args.out.read_text())
    headers = {name: name.replace("_", " ") for name in
               ("case", "full_ms", "ours_ms", "speedup", "mean_kl", "max_kl",
                "first_token_agrees", "computed_share", "prefix_ms", "over_prefix")}  # fmt: skip
    print_table("Time to the first token", lines, headers)


def find_peers(timer: Timer) -> list[Peer]:
    """kvboost, where it is installed (never in the environment of the package itself)."""
    try:
        import kvboost  # noqa: F401
    except ImportError:
        print("kvboost is not installed here: measured without it")
        return []
    return [Peer(timer, "selective"), Peer(timer, "cacheblend")]


if __name__ == "__main__":
    main()
