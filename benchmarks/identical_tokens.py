"""Does a model say the same with its history packed?

    python benchmarks/identical_tokens.py                   # 20 prompts, 64 tokens, bf16 and fp32
    python benchmarks/identical_tokens.py --prompts 4 --new-tokens 16 --dtype bf16

Real prompts of 100 to 700 tokens are continued greedily with ``DynamicCache`` and with
``GAACCache``; the end-of-text token is suppressed, so that every continuation has its full length.
Counts the continuations that are the same, and reports the largest difference of any logit up to
the first different token. Exits with status 1 where a continuation differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import texts
import torch
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
    return row


def summary(dtype: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One line per dtype."""
    return {
        "dtype": dtype,
        "identical": f"{sum(row['identical'] for row in rows)} of {len(rows)}",
        "prompts_with_sealed_blocks": sum(row["sealed_tokens"] > 0 for row in rows),
        "prompt_tokens": f"{min(r['prompt_tokens'] for r in rows)}"
        f"-{max(r['prompt_tokens'] for r in rows)}",
        "largest_logit_difference": max(row["largest_logit_difference"] for row in rows),
    }


def run(args: argparse.Namespace, path: str, prompts: list[str]) -> list[dict[str, Any]]:
    """Every prompt in every dtype."""
    tokenizer = common.load_tokenizer(path)
    rows = []
    for dtype in args.dtype:
        model = common.load_model(path, dtype)
        for idx, prompt in enumerate(prompts):
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            row = compare(model, ids, args.new_tokens)
            rows.append({"dtype": dtype, "prompt": idx, "new_tokens": args.new_tokens, **row})
    return rows


def main() -> int:
    """Runs, prints and writes; returns the exit status."""
    parser = common.argument_parser(__doc__, "identical_tokens")
    parser.add_argument("--prompts", type=int, default=20, help="how many prompts (20)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate (64)")
    parser.add_argument("--dtype", nargs="+", choices=list(common.DTYPES), default=["bf16", "fp32"])
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
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
