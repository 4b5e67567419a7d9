"""Keys and values of a real model, for the kernel benchmarks.

    python benchmarks/capture_kv.py --out kv.safetensors     # SmolLM2, 4,096 tokens of code, a CPU

int16 bit patterns of bf16: ``keys`` and ``values`` ``[heads, tokens, head_dim]``, heads from six
layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import argument_parser, load_model, load_tokenizer, model_path, prefill, token_ids
from safetensors.torch import save_file
from texts import code_text
from transformers import DynamicCache


def main() -> None:
    parser = argument_parser(__doc__, "kv")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    args = parser.parse_args()
    path = model_path(args)
    ids = token_ids(load_tokenizer(path), code_text(), args.tokens)
    layers = prefill(load_model(path, "bf16"), DynamicCache(), ids).layers
    chosen = layers[4::5]
    states = {
        name: torch.cat([getattr(layer, name)[0] for layer in chosen])[: args.heads]
        for name in ("keys", "values")
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous().view(torch.int16) for name, x in states.items()}, args.out)
    print({name: tuple(x.shape) for name, x in states.items()}, "written to", args.out.name)


if __name__ == "__main__":
    main()
