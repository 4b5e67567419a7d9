"""Tokens per second of one request whose exact KV cache lies in host memory, on a GPU.

    python benchmarks/speculate.py --device cuda --shape 8b
    python benchmarks/speculate.py --device cuda --shape deep --model <SmolLM2's folder>

"8b": Llama-3.1-8B's shape with random weights over random keys and values. Such a model accepts
nothing worth showing, so that the *acceptance is replayed*: quantiles of what SmolLM2 had accepted
with the method that is timed (``benchmarks/results/speculate.jsonl``). "deep":
SmolLM2 with layers added that add nothing (their output projections are zero), real text, real
acceptance.

Each length is measured against transformers' offloaded cache and against the time in which an ideal
link would move the exact cache once per token, in the same run; each case is written at once.
``device_part`` is the peak of device memory beyond the model's weights by the bf16 exact cache.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import texts
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_kvcodecs import SpeculativeKVCache, draft_verify
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.compressors import KIVI, Compressor, Dropper, Knorm, StreamingLLM
from hf_kvcodecs.generation.candidate_generator import Draft
from hf_kvcodecs.generation.draft_step import DraftStep
from hf_kvcodecs.generation.inputs import RowInputs
from hf_kvcodecs.generation.planner import plan_round
from hf_kvcodecs.generation.row import RowDecoder

DRAFT_LENGTH, ROUNDS, BASELINE_STEPS = 25, 12, 5
# transformers allocates pinned memory anew in its first steps, which take up to five times as long.
BASELINE_WARM_UP = 8
DEEP_LAYERS = 240


class ReplayedAcceptance(RowDecoder):
    """Does all the work of a round, and accepts as many drafts as were recorded."""

    recorded: Iterator[int]

    def _accept(self, draft: Draft, logits: torch.Tensor) -> tuple[int, int]:
        drafted = draft.tokens.shape[1]
        accepted = min(next(self.recorded), drafted)
        chosen = logits[0].argmax(-1)
        for index in range(accepted):
            self._emit(draft.tokens[:, index], logits[:, index], logits[:, index])
        self._emit(chosen[accepted : accepted + 1], logits[:, accepted], logits[:, accepted])
        return accepted + 1, accepted


def recorded_acceptance(method: str, setting: str, draft_length: int) -> list[int]:
    """Accepted tokens round by round, as the acceptance table recorded them.

    Raises:
        SystemExit: there is no such table, or no such row in it.
    """
    path = common.RESULTS / "speculate.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        facts = row.get("method"), row.get("setting"), row.get("draft_length")
        if facts == (method, setting, draft_length):
            found: list[int] = row["accepted_by_round"]
            return found
    raise SystemExit(
        f"speculate: no row for {method}, {setting}, {draft_length} drafted in {path.name}: run "
        "benchmarks/speculate.py without --device first"
    )


class Results:
    """Writes each row as it comes and keeps the time."""

    def __init__(self, path: Path, seconds: float, env: dict[str, Any]) -> None:
        self.path, self.env = path, env
        self.end = time.perf_counter() + seconds
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    @property
    def time_left(self) -> float:
        return self.end - time.perf_counter()

    def add(self, **row: Any) -> dict[str, Any]:
        self.rows.append(row)
        with self.path.open("a") as out:
            out.write(json.dumps({**row, **self.env}) + "\n")
        shown = {k: v for k, v in row.items() if not isinstance(v, list)}
        print(json.dumps(shown, default=str), flush=True)
        return row


def run(args: argparse.Namespace) -> int:
    """All cases, as far as the time reaches."""
    if not torch.cuda.is_available():
        print("speculate: --device cuda, but there is no CUDA device")
        return 2
    env = common.environment("random weights") | {"gpu": torch.cuda.get_device_name()}
    out = args.out.with_name("speculate_speed.jsonl") if args.out.suffix else args.out
    results = Results(out, args.seconds, env)
    link = link_bandwidth()
    results.add(case="link", pinned_gb_per_second=link / 1e9)
    if args.shape in ("8b", "all"):
        speed_8b(args, results, link)
    if args.shape in ("deep", "all"):
        speed_deep(args, results, link)
    parts = [row["device_part"] for row in results.rows if "device_part" in row]
    if parts:
        results.add(case="least device memory", device_part=min(parts), within=min(parts) <= 0.3)
    print(f"{len(results.rows)} cases in {out.name}, {results.time_left:.0f} s left")
    return 1 if parts and min(parts) > 0.3 else 0


def link_bandwidth() -> float:
    """Bytes per second from pinned host memory, the median of five."""
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = [timed(lambda: device.copy_(host, non_blocking=True)) for _ in range(6)][1:]
    return host.nbytes / statistics.median(times)


def timed(function: Any) -> float:
    """Seconds of ``function``, the device's work included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_host_cache is not None:
        empty_host_cache()


@torch.no_grad()
def fill(cache: Any, config: Any, tokens: int) -> Any:
    """``cache`` with every layer holding random keys and values of ``tokens`` tokens, with the
    spread over channels that real ones have."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    spread = torch.randn(shape[3], device="cuda", generator=generator).exp()
    keys, values = (
        torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) * spread
        for _ in range(2)
    )
    keys, values = keys.to(torch.bfloat16), values.to(torch.bfloat16)
    for layer in range(config.num_hidden_layers):
        cache.update(keys.roll(layer, 1), values.roll(layer, 1), layer)
    torch.cuda.synchronize()
    return cache


@torch.no_grad()
def offloaded_step(model: Any, tokens: int) -> float:
    """Seconds of a decode step with transformers' offloaded cache, the median."""
    cache = fill(DynamicCache(config=model.config, offloading=True), model.config, tokens)
    token = torch.full((1, 1), 7, device="cuda")
    arguments = {"use_cache": True, CACHE_ARGUMENT: cache}
    step = partial(model, input_ids=token, **arguments)
    times = [timed(step) for _ in range(BASELINE_WARM_UP + BASELINE_STEPS)]
    return statistics.median(times[BASELINE_WARM_UP:])


def speed_8b(args: argparse.Namespace, results: Results, link: float) -> None:
    """Every length: the baseline, then settings of ours."""
    from decode import llama_8b

    model = llama_8b()
    weights = torch.cuda.memory_allocated()
    for tokens in args.lengths:
        if results.time_left < 20 + tokens / 4096:
            results.add(case="skipped", tokens=tokens, why="no time left")
            continue
        kv_bytes = 2 * 2 * tokens * 8 * 128 * 32
        step = offloaded_step(model, tokens)
        clean()
        results.add(case="offloaded", tokens=tokens, step_ms=step * 1e3, kv_gb=kv_bytes / 1e9)
        for full_codec in ("gaac", None):
            if results.time_left < 15 + tokens / 8192:
                results.add(case="skipped", tokens=tokens, codec=full_codec, why="no time left")
                continue
            cache = SpeculativeKVCache(
                model.config, compressor=UNIFORM, full_codec=full_codec, refresh_tokens=512
            )
            cache.decoding = True
            fill(cache, model.config, tokens)
            for setting in settings(tokens, full_codec):
                if results.time_left < 8:
                    break
                row = measure(model, cache, setting, link, weights)
                compare(row, step, kv_bytes / link)
                results.add(case="ours", tokens=tokens, codec=full_codec, **row)
            if tokens == 65536 and full_codec == "gaac" and results.time_left > 10:
                folder = results.path.parent
                results.add(case="overlap", tokens=tokens, **overlap(model, cache, folder))
            del cache
            clean()
    del model
    clean()


@dataclass(frozen=True, slots=True)
class Setting:
    """A draft face of some shape, the recorded acceptance of the method that has that shape, how
    many layers are staged, and how many tokens are drafted."""

    method: str
    keep: float
    compressor: Compressor
    layers: int
    compiled: bool = False
    draft_length: int = DRAFT_LENGTH

    @property
    def name(self) -> str:
        """As the acceptance table has it."""
        quantiser = self.compressor.quantiser
        return f"keep {self.keep}" + (f", {quantiser.bits} bit" if quantiser else "")

    @property
    def recorded(self) -> list[int]:
        """What :data:`ROUNDS` rounds accept: as many quantiles of the recorded rounds."""
        found = sorted(recorded_acceptance(self.method, self.name, self.draft_length))
        return [found[(2 * i + 1) * len(found) // (2 * ROUNDS)] for i in range(ROUNDS)]


def dropping(keep: float) -> Compressor:
    """As many tokens in each head, as SnapKV keeps them: which ones does not matter for speed."""
    return Compressor(dropper=Dropper(scorer=StreamingLLM(), keep=keep))


def ragged(keep: float) -> Compressor:
    """Another count in each head, as KVzip keeps them."""
    return Compressor(dropper=Dropper(scorer=Knorm(), keep=keep, budget="model"))


def quantised(keep: float) -> Compressor:
    """As :func:`ragged`, and what is kept in 4 bits."""
    return replace(ragged(keep), quantiser=KIVI(bits=4))


UNIFORM = dropping(0.2)


def settings(tokens: int, full_codec: str | None) -> list[Setting]:
    """The most at 64K."""
    two, everything = (Setting("snapkv", 0.2, UNIFORM, layers) for layers in (2, 34))
    packed = Setting("kvzip+kivi", 0.4, quantised(0.4), 2)
    best = Setting("kvzip", 0.2, ragged(0.2), 2)
    compiled = replace(packed, compiled=True)
    longer = replace(compiled, draft_length=40)
    if tokens != 65536:
        ragged_compiled = replace(best, compiled=True)
        others = [packed, two, everything, ragged_compiled, best]
        return [longer, compiled, *others] if full_codec else [two]
    if full_codec is None:
        return [two, everything]
    return [
        longer,
        compiled,
        *(replace(longer, layers=layers) for layers in (3, 5, 34)),
        packed,
        replace(compiled, layers=5),
        replace(compiled, layers=34),
        replace(best, compiled=True, draft_length=40),
        replace(best, compiled=True),
        Setting("kvzip+kivi", 0.2, quantised(0.2), 2, compiled=True),
        best,
        two,
        *(Setting("snapkv", 0.2, UNIFORM, layers) for layers in (4, 8, 16)),
        everything,
        Setting("snapkv", 0.1, dropping(0.1), 2),
    ]


@torch.no_grad()
def measure(
    model: Any,
    cache: SpeculativeKVCache,
    setting: Setting,
    link: float,
    weights: int,
) -> dict[str, Any]:
    """Rounds with that draft face and staging area; the cache is given back as long as it was."""
    held = cache.get_seq_length()
    renew(cache, setting.compressor, setting.layers)
    cache.compile_drafts = setting.compiled
    torch.cuda.reset_peak_memory_stats()
    decoder = decoder_of(model, cache, held, setting.draft_length)
    decoder.recorded = itertools.cycle(setting.recorded)
    decoder._round()  # compresses, captures the graph, warms up
    decoder.recorded = iter(setting.recorded)
    peak_first = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moved, tokens = cache.faces.bytes_read, decoder.report.tokens
    seconds = [timed(decoder._round) for _ in range(ROUNDS)]
    made = decoder.report.tokens - tokens
    moved = (cache.faces.bytes_read - moved) / ROUNDS
    peak = torch.cuda.max_memory_allocated()
    draft_bytes, full_bytes, dense_bytes = cache.face_bytes()
    staging_bytes = cache.faces.held_staging_bytes
    row = parts_of_a_round(decoder, held)
    predicted = plan_round(
        draft_step_seconds=row["draft_step_ms"] / 1e3,
        verify_seconds=row["verify_ms"] / 1e3,
        kv_bytes=dense_bytes,
        link_bandwidth=link,
        draft_length=setting.draft_length,
        accepted=made / ROUNDS - 1,
        staging_bytes=staging_bytes,
        link_ratio=full_bytes / dense_bytes,
    )
    round_seconds = statistics.fmean(seconds)
    cache.end_draft()
    cache.crop(held - cache.get_seq_length())
    return {
        "setting": f"{setting.method} {setting.name}, {setting.layers} layers staged"
        + (", compiled" if setting.compiled else ""),
        "draft_length": setting.draft_length,
        "recorded_mean_accepted": statistics.fmean(setting.recorded),
        "round_ms": round_seconds * 1e3,
        "rounds_ms": [1e3 * one for one in seconds],
        "tokens_per_round": made / ROUNDS,
        "token_ms": 1e3 * sum(seconds) / made,
        "tokens_per_second": made / sum(seconds),
        **row,
        "predicted_round_ms": predicted.seconds * 1e3,
        "prediction_error": predicted.seconds / round_seconds - 1,
        "link_gb_per_round": moved / 1e9,
        "link_ratio": full_bytes / dense_bytes,
        "draft_part": draft_bytes / dense_bytes,
        "staging_part": staging_bytes / dense_bytes,
        "device_part": (peak - weights) / dense_bytes,
        "device_part_when_compressing": (peak_first - weights) / dense_bytes,
    }


def renew(cache: SpeculativeKVCache, compressor: Compressor, layers: int) -> None:
    """Another draft face and another staging area over the same exact face."""
    for layer in cache.own_layers:
        layer.draft = None
    cache.faces.drop()
    cache.faces.streams.clear()
    layer_bytes = cache.face_bytes()[2] / len(cache.own_layers)
    # Slots have some spare rows; two layers are what None means.
    staging = None if layers <= 2 else int(layers * (layer_bytes * 1.02 + (4 << 20)))
    cache.faces.compressor, cache.faces.staging_bytes = compressor, staging
    clean()


def decoder_of(
    model: Any, cache: SpeculativeKVCache, held: int, draft_length: int = DRAFT_LENGTH
) -> ReplayedAcceptance:
    """A decoder behind a text of ``held`` tokens and one more."""
    ids = torch.randint(5, 1000, (1, held + 1), device="cuda")
    cache.draft_length = draft_length
    return ReplayedAcceptance(
        RowInputs(model, cache, {}, held + 1),
        ids,
        LogitsProcessorList(),
        StoppingCriteriaList([MaxLengthCriteria(max_length=held + 10**6)]),
        sample=False,
        max_length=held + 10**6,
        eos_token_ids=set(),
    )


def parts_of_a_round(decoder: RowDecoder, held: int) -> dict[str, float]:
    """A draft step alone, and a verification with every layer already there or as it is."""
    cache = decoder.cache
    drafted = int(cache.draft_length)
    cache.begin_draft()
    cache.stage(len(cache.layers))
    step = decoder.generator._step
    if step is None or not step.valid:
        step = DraftStep(decoder.inputs)
    token, start = decoder.ids[:, -1:], decoder.ids.shape[1] - 1
    torch.cuda.synchronize()  # what is prefetched has arrived
    steps = [timed(lambda: step(token, start)) for _ in range(6)]
    cache.begin_verify()
    read = torch.cat([token, token.expand(1, drafted)], dim=1)
    verify = timed(lambda: decoder.inputs.forward(read, start))
    cache.commit(1, drafted + 1)
    cache.begin_verify()  # straight away: nothing was prefetched
    whole = timed(lambda: decoder.inputs.forward(read, start + 1))
    cache.commit(1, drafted + 1)
    return {
        "draft_step_ms": 1e3 * statistics.median(steps[1:]),
        # With few slots the rest still crosses the link: what the forward costs itself shows where
        # every layer is staged.
        "verify_after_draft_ms": 1e3 * verify,
        "verify_unprepared_ms": 1e3 * whole,
        "verify_ms": verify_compute_ms(decoder, read),
    }


def verify_compute_ms(decoder: RowDecoder, read: torch.Tensor) -> float:
    """Milliseconds of a verification's forward without any transfer: over a short exact face, and
    with what attention over the whole history takes added at memory speed."""
    cache = decoder.cache
    short = SpeculativeKVCache(cache.config, compressor=cache.compressor)
    short.decoding = True
    fill(short, decoder.inputs.model.config, 4096)
    inputs = RowInputs(decoder.inputs.model, short, {}, 4097)
    forward = 0.0
    for start in range(4096, 4099):
        short.begin_verify()
        forward = timed(partial(inputs.forward, read, start))
        short.commit(1, read.shape[1])
    _, _, dense = cache.face_bytes()
    return 1e3 * (forward + dense / 4.0e12)


def compare(row: dict[str, Any], offloaded_seconds: float, ideal_seconds: float) -> None:
    """How many times faster than the offloaded cache and than an ideal link."""
    row["times_offloaded"] = offloaded_seconds * row["tokens_per_second"]
    row["times_ideal_link"] = ideal_seconds * row["tokens_per_second"]


@torch.no_grad()
def overlap(model: Any, cache: SpeculativeKVCache, folder: Path) -> dict[str, float]:
    """How much of the transfer to the device a trace shows beside kernels, in one round with every
    layer staged; the trace is written to ``folder``."""
    from torch.profiler import ProfilerActivity, profile

    held = cache.get_seq_length()
    renew(cache, UNIFORM, 34)
    decoder = decoder_of(model, cache, held)
    decoder.recorded = itertools.cycle(recorded_acceptance("snapkv", "keep 0.2", DRAFT_LENGTH))
    decoder._round()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        decoder._round()
        torch.cuda.synchronize()
    trace.export_chrome_trace(str(folder / "speculate_trace.json.gz"))
    copies, kernels = [], []
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        if "HtoD" in event.name:
            copies.append(span)
        elif "Memcpy" not in event.name and "Memset" not in event.name:
            kernels.append(span)
    copied = sum(stop - start for start, stop in copies)
    both = shared_microseconds(copies, kernels)
    cache.end_draft()
    cache.crop(held - cache.get_seq_length())
    return {"copies_ms": copied / 1e3, "beside_kernels_part": both / max(copied, 1e-9)}


def shared_microseconds(
    copies: list[tuple[float, float]], kernels: list[tuple[float, float]]
) -> float:
    """How long copies ran while some kernel ran."""
    merged: list[list[float]] = []
    for start, stop in sorted(kernels):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return sum(
        max(0.0, min(stop, high) - max(start, low))
        for start, stop in copies
        for low, high in merged
    )


def speed_deep(args: argparse.Namespace, results: Results, link: float) -> None:
    """SmolLM2 made deeper: real text, real acceptance, through ``generate``."""
    if args.model is None:
        results.add(case="skipped", shape="deep", why="no --model: SmolLM2's folder is needed")
        return
    tokenizer = common.load_tokenizer(args.model)
    model = deepened(common.load_model(args.model, "bf16").cuda(), DEEP_LAYERS)
    ids = common.token_ids(tokenizer, texts.code_text(), 7000).cuda()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    step = offloaded_generate(model, ids, options)
    results.add(case="offloaded", shape="deep", tokens=ids.shape[1], step_ms=step * 1e3)
    clean()
    for name, staging in (("2 layers", None), ("all layers", 1 << 40)):
        for compressor, keep in (("snapkv", 0.2), ("kvzip", 0.2)):
            if results.time_left < 15:
                results.add(case="skipped", shape="deep", why="no time left")
                return
            cache = SpeculativeKVCache(
                model.config,
                compressor=compressor,
                keep=keep,
                draft_length=DRAFT_LENGTH,
                staging_bytes=staging,
            )
            count = 128
            model.generate(
                ids,
                min_new_tokens=count,
                max_new_tokens=count,
                custom_generate=draft_verify,
                **options,
                **{CACHE_ARGUMENT: cache},
            )
            report = cache.report()
            seconds = report.draft_seconds + report.verify_seconds
            row = {
                "tokens_per_second": report.tokens / seconds,
                "mean_accepted": report.mean_accepted,
                "draft_part": report.draft_bytes / report.dense_bytes,
                "staging_part": report.staging_bytes / report.dense_bytes,
            }
            compare(row, step, report.dense_bytes / link)
            results.add(
                case="ours",
                shape="deep",
                tokens=ids.shape[1],
                setting=f"{compressor} keep {keep}, {name}",
                **row,
            )
            del cache
            clean()


def offloaded_generate(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> float:
    """Seconds of a token with transformers' offloaded cache."""
    cache, new = DynamicCache(config=model.config, offloading=True), 9
    with torch.no_grad():
        for part in ids[:, :-1].split(1024, dim=1):
            model(part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    arguments = {"min_new_tokens": new, "max_new_tokens": new, CACHE_ARGUMENT: cache}
    return timed(lambda: model.generate(ids, **options, **arguments)) / new


def deepened(model: Any, layers: int) -> Any:
    """``model`` with layers added that add nothing: their output projections are zero."""
    held = model.model.layers
    for index in range(len(held), layers):
        extra = copy.deepcopy(held[index % len(held)])
        extra.self_attn.layer_idx = index
        torch.nn.init.zeros_(extra.self_attn.o_proj.weight)
        torch.nn.init.zeros_(extra.mlp.down_proj.weight)
        held.append(extra)
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = ["full_attention"] * layers
    return model
