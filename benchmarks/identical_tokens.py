"""Does a model say the same with its history packed?

    python benchmarks/identical_tokens.py                   # 20 prompts, 64 tokens, bf16 and fp32
    python benchmarks/identical_tokens.py --prompts 4 --new-tokens 16 --dtype bf16
    python benchmarks/identical_tokens.py --device cuda --prompts 50 --dtype bf16 --out gpu.jsonl

Real prompts of 100 to 700 tokens are continued greedily with ``DynamicCache`` and with
``GAACCache``; the end-of-text token is suppressed, so that every continuation has its full length.
Counts the continuations that are the same, and reports the largest difference of any logit up to
the first different token. Exits with status 1 where a continuation differs.

On a GPU bf16 attention is fused and rounds otherwise than torch's: there ``other_kernel_identical``
says whether ``DynamicCache`` says the same with another of torch's kernels, and the status is 0.
The calls of the fused kernel are counted: one for each layer and step, or the run stops.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import texts
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT


def generate(
    model: Any, ids: torch.Tensor, cache: Any, new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy continuation of ``ids``: tokens ``[new]`` and raw logits ``[new, vocab]``."""
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **{CACHE_ARGUMENT: cache},
    )
    return out.sequences[0, ids.shape[1] :], torch.cat(out.logits).float()


def compare(model: Any, ids: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    """Both continuations of one prompt, compared."""
    ids = ids.to(model.device)
    plain, plain_logits = generate(model, ids, DynamicCache(), new_tokens)
    cache = GAACCache()
    packed, packed_logits = generate(model, ids, cache, new_tokens)
    differing = (plain != packed).nonzero().flatten().tolist()
    position = differing[0] if differing else None
    compared = slice(0, new_tokens if position is None else position + 1)
    row = {
        "prompt_tokens": ids.shape[1],
        "sealed_tokens": cache.layers[0].pair.sealed_tokens,
        "identical": position is None,
        "largest_logit_difference": float(
            (plain_logits[compared] - packed_logits[compared]).abs().max()
        ),
    }
    if position is not None:
        logits = plain_logits[position]
        row["position"] = position
        row["logit_gap"] = float(logits[plain[position]] - logits[packed[position]])
    if model.device.type == "cuda":
        with sdpa_kernel(SDPBackend.MATH):
            other, _ = generate(model, ids, DynamicCache(), new_tokens)
        row["other_kernel_identical"] = torch.equal(other, plain)
    return row


def count_fused_calls(model: Any, ids: torch.Tensor) -> int:
    """Calls of the fused kernel in four decode steps behind ``ids``.

    Raises:
        NotExactError: not one for each layer and step.
    """
    from decode import fused_calls

    calls = fused_calls(lambda: generate(model, ids.to(model.device), GAACCache(), 5))
    if calls != 4 * model.config.num_hidden_layers:
        raise common.NotExactError(f"{calls} fused calls in 4 steps of all layers")
    return calls


def summary(dtype: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One line per dtype."""
    return {
        "dtype": dtype,
        "identical": f"{sum(row['identical'] for row in rows)} of {len(rows)}",
        "prompts_with_sealed_blocks": sum(row["sealed_tokens"] > 0 for row in rows),
        "prompt_tokens": f"{min(r['prompt_tokens'] for r in rows)}"
        f"-{max(r['prompt_tokens'] for r in rows)}",
        "largest_logit_difference": max(row["largest_logit_difference"] for row in rows),
        "other_kernel_identical": sum(row.get("other_kernel_identical", False) for row in rows),
    }


def run(args: argparse.Namespace, path: str, prompts: list[str]) -> list[dict[str, Any]]:
    """Every prompt in every dtype."""
    tokenizer = common.load_tokenizer(path)
    rows = []
    for dtype in args.dtype:
        model = common.load_model(path, dtype).to(args.device)
        for idx, prompt in enumerate(prompts):
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            row = compare(model, ids, args.new_tokens)
            rows.append({"dtype": dtype, "prompt": idx, "new_tokens": args.new_tokens, **row})
        if args.device == "cuda" and dtype == "bf16":
            calls = count_fused_calls(model, ids)
            print(f"{calls} fused calls in 4 steps of {model.config.num_hidden_layers} layers")
    return rows


def main() -> int:
    """Runs, prints and writes; returns the exit status."""
    parser = common.argument_parser(__doc__, "identical_tokens")
    parser.add_argument("--prompts", type=int, default=20, help="how many prompts (20)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate (64)")
    parser.add_argument("--dtype", nargs="+", choices=list(common.DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    path = common.model_path(args)
    prompts = texts.real_prompts(common.load_tokenizer(path), args.prompts)
    rows = run(args, path, prompts)

    env = common.environment(path) | {"prompts_digest": texts.digest("".join(prompts))}
    common.print_environment(env)
    print(f"prompts {env['prompts_digest']}, {args.new_tokens} new tokens each")
    by_dtype = {dtype: [row for row in rows if row["dtype"] == dtype] for dtype in args.dtype}
    common.print_table(
        "Greedy continuations, GAACCache against DynamicCache",
        [summary(dtype, found) for dtype, found in by_dtype.items()],
    )
    different = [row for row in rows if not row["identical"]]
    if different:
        common.print_table("Where they part", different)
    common.write_results(args.out, env, rows)
    return 1 if different and args.device == "cpu" else 0


if __name__ == "__main__":
    sys.exit(main())
