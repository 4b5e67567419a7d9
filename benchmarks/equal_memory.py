"""Tokens per second that fit into the same memory: packed against BF16 keys and values.

    python benchmarks/equal_memory.py --kv kv.safetensors --tokens 65536 --batch 11

Llama-3.1-8B's shape with random weights, decoded by ``model.generate`` with a compiled step, as in
``decode.py``. ``--batch`` sequences of BF16 keys and values give the budget; as many packed ones as
fit into it decode beside them. transformers' own compiled cache repeats keys and values for grouped
queries and is far slower: that is no measure of what packing gains. So BF16 is given the same ways:
written in place, and read where it lies by torch's fastest kernel (cuDNN's, without a mask, over
every row that the cache has room for), 256 of them more than the text has.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import argument_parser, environment, print_table, write_results
from decode import WARM_UP, fill, generate, llama_8b
from safetensors.torch import load_file
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

from hf_kvcodecs import GAACCache


def in_place(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one token over the whole cache."""
    out = F.scaled_dot_product_attention(q, k, v, scale=options["scaling"], enable_gqa=True)
    return out.transpose(1, 2), None


def no_mask(*args: Any, **options: Any) -> None:
    """In place of a mask."""


def timed(model: Any, cache: Any, kv: Any, batch: int, tokens: int, steps: int) -> float:
    """The median milliseconds of a step."""
    fill(cache, kv, model.config, batch, tokens)
    times = generate(model, cache, batch, tokens, WARM_UP + steps)
    torch._dynamo.reset()
    return statistics.median(times[WARM_UP:])


def case(model: Any, kv: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Both caches."""
    config, capacity = model.config, tokens + 256
    row: dict[str, Any] = {"tokens": tokens, "BF16 batch": batch}
    model.set_attn_implementation("in_place")
    cache: Any = StaticCache(config, max_cache_len=capacity)
    row["BF16 ms"] = timed(model, cache, kv, batch, tokens, steps)
    budget = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    del cache
    gc.collect()
    torch.cuda.empty_cache()
    model.set_attn_implementation("sdpa")
    cache = fill(GAACCache(config, max_tokens=capacity), kv, config, 1, tokens)
    one = cache.memory().total_bytes
    del cache
    row["budget GB"], row["packed batch"] = budget / 1e9, budget // one
    cache = GAACCache(config, max_tokens=capacity)
    row["packed ms"] = timed(model, cache, kv, row["packed batch"], tokens, steps)
    row["packed GB"] = cache.memory().total_bytes / 1e9
    for kind in ("BF16", "packed"):
        row[f"{kind} tokens/s"] = 1e3 * row[f"{kind} batch"] / row[f"{kind} ms"]
    row["factor"] = row["packed tokens/s"] / row["BF16 tokens/s"]
    return row


def main() -> None:
    parser = argument_parser(__doc__, "equal_memory")
    parser.add_argument("--kv", type=Path, required=True, help="captured keys and values")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=11, help="BF16 sequences that fit")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    AttentionInterface.register("in_place", in_place)
    AttentionMaskInterface.register("in_place", no_mask)
    model = llama_8b()
    rows = [case(model, load_file(args.kv), args.batch, args.tokens, args.steps)]
    env = environment("Llama-3.1-8B shape") | {"gpu": torch.cuda.get_device_name()}
    write_results(args.out, env, rows)
    print_table("Tokens per second in the same memory", rows, {name: name for name in rows[0]})


if __name__ == "__main__":
    main()
