"""Does draft_verify say what plain generate says, and what does sampling have accepted?

    python benchmarks/speculate_exact.py                          # 4 prompts, 48 tokens
    python benchmarks/speculate_exact.py --prompts 20 --new-tokens 128 --methods all

Greedy: SmolLM2 continues real prompts of 100 to 700 tokens with ``DynamicCache`` and with
``SpeculativeKVCache``; counts identical texts, and reports the largest KL divergence of the logits
at any position before the texts part. In bf16 a forward over several tokens rounds differently from
single ones: every divergence is listed with the gap of the two logits, and beside it how far the
model is from itself where it reads the plain text at once. Sampling: the part of
drafted tokens accepted at each temperature. Draft length: forwards and time by rule. Exits with
status 1 where fp32 texts differ or the divergence is too large.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import common
import texts
import torch
from transformers import DynamicCache

from hf_kvcodecs import SpeculativeKVCache, draft_verify
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

METHODS: dict[str, dict[str, Any]] = {
    "reselect+kivi": {"keep": 0.4, "bits": 4},
    "kvzip": {"keep": 0.2},
    "snapkv": {"keep": 0.2},
    "kivi": {"bits": 4},
    "streaming_llm": {"keep": 0.2},
    "tova": {"keep": 0.2},
    "expected_attention": {"keep": 0.2},
    "knorm": {"keep": 0.2},
    "online": {"keep": 0.2},
    "rotate": {"bits": 4},
    "snapkv+kivi": {"keep": 0.2, "bits": 4},
}
FEW = ("reselect+kivi", "snapkv")
LIMITS = {"fp32": 1e-6, "bf16": 0.01}  # nats


def generate(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    """A continuation of the full length, with its logits."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **{CACHE_ARGUMENT: cache},
        **options,
    )


def largest_divergence(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest KL divergence, nats, of logits ``[positions, vocab]`` at one position."""
    ours, theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    each = torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    return float(each.max())


@torch.no_grad()
def read_at_once(model: Any, prompt_tokens: int, plain: Any) -> float:
    """How far the model's logits are from those of its own single steps where it reads the plain
    text in one forward call: what rounding alone does to any verification."""
    logits = model(plain.sequences, use_cache=False).logits[0, prompt_tokens - 1 : -1]
    return largest_divergence(logits, torch.cat(plain.logits))


def greedy(model: Any, ids: torch.Tensor, plain: Any, method: str, **options: Any) -> Any:
    """One prompt with drafts, compared with the plain continuation."""
    cache = SpeculativeKVCache(compressor=method, hold_decoded=True, **METHODS[method])
    out = generate(model, ids, cache, custom_generate=draft_verify, do_sample=False, **options)
    new = ids.shape[1]
    differing = (out.sequences[0, new:] != plain.sequences[0, new:]).nonzero().flatten().tolist()
    stop = differing[0] + 1 if differing else len(plain.logits)
    ours, theirs = (torch.cat(found.logits[:stop]) for found in (out, plain))
    row = {
        "identical": not differing,
        "largest_kl_nats": largest_divergence(ours, theirs),
        "mean_accepted": cache.report().mean_accepted,
    }
    if differing:
        logits = plain.logits[differing[0]][0].float()
        chosen = [found.sequences[0, new + differing[0]] for found in (plain, out)]
        row["position"] = differing[0]
        row["logit_gap"] = float(logits[chosen[0]] - logits[chosen[1]])
        row["bf16_step_there"] = float(logits.max().abs() * 2**-7)
    return row


def sampled(model: Any, ids: torch.Tensor, temperature: float, new_tokens: int) -> Any:
    """Acceptance of one prompt at one temperature."""
    cache = SpeculativeKVCache(
        compressor="reselect+kivi", hold_decoded=True, **METHODS["reselect+kivi"]
    )
    torch.manual_seed(0)
    generate(
        model,
        ids,
        cache,
        custom_generate=draft_verify,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )
    return cache.report()


def with_length(model: Any, ids: torch.Tensor, length: int | str, new_tokens: int) -> Any:
    """Time and tokens of one prompt by one rule for draft lengths."""
    cache = SpeculativeKVCache(
        compressor="snapkv", keep=0.2, draft_length=length, hold_decoded=True
    )
    began = time.perf_counter()
    generate(
        model,
        ids,
        cache,
        custom_generate=draft_verify,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )
    report = cache.report()
    return report, time.perf_counter() - began - report.prefill_seconds


def main() -> int:
    """Runs, prints and writes; returns the exit status."""
    parser = common.argument_parser(__doc__, "speculate_exact")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--methods", nargs="+", default=list(FEW))
    parser.add_argument("--dtypes", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.3, 0.7, 1.0])
    parser.add_argument("--draft-lengths", nargs="*", default=["5", "25", "auto"])
    args = parser.parse_args()
    methods = list(METHODS) if args.methods == ["all"] else args.methods
    path = common.model_path(args)
    tokenizer, env = common.load_tokenizer(path), common.environment(path)
    prompts = [
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        for text in texts.real_prompts(tokenizer, max(args.prompts, 4))[: args.prompts]
    ]
    length = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        model = common.load_model(path, dtype)
        for index, ids in enumerate(prompts):
            plain = generate(model, ids, DynamicCache(), do_sample=False, **length)
            at_once = {"read_at_once_kl_nats": read_at_once(model, ids.shape[1], plain)}
            for method in methods:
                found = greedy(model, ids, plain, method, **length) | at_once
                rows.append(
                    {"case": "greedy", "dtype": dtype, "method": method, "prompt": index, **found}
                )
                print(rows[-1], flush=True)
        if dtype == "bf16":
            continue
        for temperature in args.temperatures:
            reports = [sampled(model, ids, temperature, args.new_tokens) for ids in prompts]
            drafted = sum(report.drafted for report in reports)
            rounds = sum(report.rounds for report in reports)
            accepted = sum(report.accepted for report in reports)
            rows.append(
                {
                    "case": "sampling",
                    "temperature": temperature,
                    "acceptance_rate": accepted / drafted,
                    "mean_accepted": accepted / rounds,
                }
            )
            print(rows[-1], flush=True)
        for option in args.draft_lengths:
            rule: int | str = option if option == "auto" else int(option)
            found_by = [with_length(model, ids, rule, args.new_tokens) for ids in prompts]
            seconds = sum(one[1] for one in found_by)
            drafted = sum(one[0].drafted for one in found_by)
            rows.append(
                {
                    "case": "draft length",
                    "draft_length": option,
                    "tokens_per_second": args.new_tokens * len(prompts) / seconds,
                    "acceptance_rate": sum(one[0].accepted for one in found_by) / drafted,
                    "mean_drafted": drafted / sum(one[0].rounds for one in found_by),
                }
            )
            print(rows[-1], flush=True)
    common.write_results(args.out, env | {"new_tokens": args.new_tokens}, rows)
    wrong = [
        row
        for row in rows
        if row["case"] == "greedy"
        and (
            row["largest_kl_nats"] > LIMITS[row["dtype"]]
            or (row["dtype"] == "fp32" and not row["identical"])
        )
    ]
    print(f"{len(wrong)} rows beyond the limits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
