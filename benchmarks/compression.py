"""How small does real KV get, without losing a bit?

    python benchmarks/compression.py                # 2,048 tokens of each text, then a whole cache
    python benchmarks/compression.py --tokens 512 --cache-tokens 0 --out small.jsonl

A model reads code, prose and chat; keys and values of every layer are encoded by each codec,
decoded again, and compared as integers. If one bit differs, no figure is printed. Then a whole
``GAACCache`` is filled and compared with ``DynamicCache`` the same way. All bytes are counted:
tables, indices, counts. Exits with status 1 where a target is missed, 2 where a bit differs.

- factor: dense bytes / packed bytes, larger is better; fp8 is counted against dense fp8.
- misfits: share of numbers listed one by one, outside their channel's window of exponents.
- escapes: share of units (16 tokens of a channel, 8 in fp8) that store an optional bit plane.
- fp16, fp8: the bf16 model's states, cast (fp8 saturates, unscaled). fp32: the model run in fp32.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import common
import texts
import torch
from transformers import DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.sequence import _cast
from hf_kvcodecs.codecs import TensorCodec, codec_for
from hf_kvcodecs.codecs.words import to_words
from hf_kvcodecs.layouts import EXPONENT_LAYOUTS, ExponentLayout, PackedBlocks

BF16_MODEL_FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FACTOR_TARGETS = {"bf16": 1.40, "fp8_e4m3": 1.12, "fp8_e5m2": 1.25}
CACHE_RATIO_TARGET = 0.73  # a whole exact bf16 cache from 8K tokens on, tail included
CACHE_TARGET_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one tensor, or many together, took when packed."""

    elements: int = 0
    dense_bytes: int = 0
    packed_bytes: int = 0
    patches: int = 0
    units: int = 0
    flagged_units: int = 0

    def __add__(self, other: Count) -> Count:
        names = self.__dataclass_fields__
        return Count(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def factor(self) -> float:
        return self.dense_bytes / self.packed_bytes

    @property
    def bits(self) -> float:
        return 8 * self.packed_bytes / self.elements


def count_states(states: torch.Tensor, codec: TensorCodec, layout: ExponentLayout) -> Count:
    """Packs ``states`` ``[batch, kv_heads, tokens, head_dim]``, full blocks only, and counts.

    Raises:
        common.NotExactError: decoding gave other bits.
    """
    blocks = states.shape[2] // codec.block_tokens
    words = to_words(states[:, :, : blocks * codec.block_tokens].contiguous())
    packed = codec.encode(words.unflatten(2, (blocks, -1)))
    decoded = codec.decode(packed, words[:, :, :0])
    if not torch.equal(decoded, words):
        raise common.NotExactError(
            f"{codec}: {(decoded != words).sum()} of {words.numel()} numbers"
        )
    units, flagged = count_units(packed, layout)
    return Count(
        elements=words.numel(),
        dense_bytes=words.nbytes,
        packed_bytes=packed.nbytes,
        patches=packed.pools["patch_bits"].numel() if "patch_bits" in packed.pools else 0,
        units=units,
        flagged_units=flagged,
    )


def count_units(packed: PackedBlocks, layout: ExponentLayout) -> tuple[int, int]:
    """How many units there are, and how many store an optional plane."""
    tags, channels = packed.planes["tags"], packed.planes["base"].shape[-1]
    shifts = torch.arange(0, 8, layout.tag_bits, dtype=torch.uint8)
    tag = (tags.unsqueeze(-1) >> shifts) & (2**layout.tag_bits - 1)
    return tags[..., 0].numel() * channels, int((tag > 0).sum())


def count_cache(cache: Any, dtype: torch.dtype) -> list[tuple[Count, Count]]:
    """Keys and values of each layer of ``cache``, cast to ``dtype`` and packed."""
    codec = codec_for(dtype)
    layout = EXPONENT_LAYOUTS[getattr(codec, "float_format", "bf16")]  # float32 packs as bf16 does
    return [
        (
            count_states(_cast(layer.keys, dtype), codec, layout),
            count_states(_cast(layer.values, dtype), codec, layout),
        )
        for layer in cache.layers
    ]


def format_row(text: str, name: str, layers: list[tuple[Count, Count]]) -> dict[str, Any]:
    """One line of the first table: all layers together, and the worst and the best of them."""
    keys = sum((pair[0] for pair in layers), Count())
    values = sum((pair[1] for pair in layers), Count())
    both = keys + values
    by_factor = sorted(((k + v).factor, idx) for idx, (k, v) in enumerate(layers))
    (worst, worst_idx), (best, best_idx) = by_factor[0], by_factor[-1]
    return {
        "text": text,
        "format": name,
        "factor": both.factor,
        "target": FACTOR_TARGETS.get(name),
        "bits": both.bits,
        "key_bits": keys.bits,
        "value_bits": values.bits,
        "misfits": both.patches / both.elements,
        "escapes": both.flagged_units / both.units,
        "worst_factor": worst,
        "in_layer": worst_idx,
        "best_factor": best,
        "of_layer": best_idx,
    }


def codec_rows(path: str, sources: dict[str, str], tokens: int) -> list[dict[str, Any]]:
    """The first table: each text in each format, and code once more from the model in fp32."""
    tokenizer = common.load_tokenizer(path)
    model = common.load_model(path, "bf16")
    rows = []
    for text, source in sources.items():
        ids = common.token_ids(tokenizer, source, tokens)
        cache = common.prefill(model, DynamicCache(), ids)
        for name, dtype in BF16_MODEL_FORMATS.items():
            rows.append(format_row(text, name, count_cache(cache, dtype)))
    ids = common.token_ids(tokenizer, sources["code"], tokens)
    cache = common.prefill(common.load_model(path, "fp32"), DynamicCache(), ids)
    rows.append(format_row("code", "fp32", count_cache(cache, torch.float32)))
    return rows


def cache_rows(path: str, source: str, tokens: int) -> list[dict[str, Any]]:
    """The second table: whole caches after a real prefill, with the emptiest and fullest tail."""
    ids = common.token_ids(common.load_tokenizer(path), source, tokens)
    rows = []
    for dtype in ("bf16", "fp32"):
        model = common.load_model(path, dtype)
        plain = common.prefill(model, DynamicCache(), ids)
        cache = common.prefill(model, GAACCache(), ids)
        common.check_same(plain, cache)
        aims = dtype == "bf16" and tokens >= CACHE_TARGET_TOKENS
        target = CACHE_RATIO_TARGET if aims else None
        rows.append(cache_row(f"{dtype}, exact", cache, target))
        cache.crop(-1)  # reopens a block: as many dense tokens as there can be
        rows.append(cache_row(f"{dtype}, exact", cache, target))
        if dtype == "bf16":
            for kv_dtype in ("fp8_e4m3", "fp8_e5m2"):
                lossy = GAACCache.from_cache(plain, kv_dtype=kv_dtype)
                rows.append(cache_row(f"bf16 cast to {kv_dtype} (lossy)", lossy, None))
    return rows


def cache_row(name: str, cache: Any, target: float | None) -> dict[str, Any]:
    """One line of the second table."""
    report = cache.memory()
    return {
        "cache": name,
        "tokens": report.tokens,
        "dense_tokens": report.tokens - cache.layers[0].pair.sealed_tokens,
        "dense_MiB": report.dense_bytes / 2**20,
        "held_MiB": report.total_bytes / 2**20,
        "ratio": report.ratio,
        "target": target,
        "sealed_bits": report.bits_per_element,
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """What fell short of its target, in words."""
    found = []
    for row in rows:
        target = row["target"]
        if target is not None and "factor" in row and row["factor"] < target:
            found.append(f"{row['text']} {row['format']}: factor {row['factor']:.3f} < {target}")
        if target is not None and "ratio" in row and row["ratio"] > target:
            found.append(f"whole cache {row['cache']}: ratio {row['ratio']:.3f} > {target}")
    return found


def main() -> int:
    """Runs both tables; returns the exit status."""
    parser = common.argument_parser(__doc__, "compression")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per text (2048)")
    parser.add_argument(
        "--cache-tokens", type=int, default=8192, help="tokens of the whole cache (8192; 0: none)"
    )
    args = parser.parse_args()
    path = common.model_path(args)
    sources = {"code": texts.code_text(), "prose": texts.prose_text(), "chat": texts.chat_text()}
    try:
        codecs = codec_rows(path, sources, args.tokens)
        caches = cache_rows(path, sources["code"], args.cache_tokens) if args.cache_tokens else []
    except common.NotExactError as error:
        print(f"not bit-exact: {error}", file=sys.stderr)
        return 2
    return report(args, path, sources, codecs, caches)


def report(
    args: argparse.Namespace,
    path: str,
    sources: dict[str, str],
    codecs: list[dict[str, Any]],
    caches: list[dict[str, Any]],
) -> int:
    """Prints and writes everything; returns the exit status."""
    env = common.environment(path)
    digests = {f"{name}_digest": texts.digest(source) for name, source in sources.items()}
    common.print_environment(env)
    print(", ".join(f"{name} {value}" for name, value in digests.items()))
    common.print_table(f"Keys and values of all layers, {args.tokens} tokens, bit-exact", codecs)
    if caches:
        common.print_table("Whole caches after a prefill of code", caches)
    rows = [{"case": "codec", "tokens": args.tokens, **row} for row in codecs]
    rows += [{"case": "cache", **row} for row in caches]
    common.write_results(args.out, env | digests, rows)
    short = missed(rows)
    print("\n".join(f"target missed: {line}" for line in short) or "every target met")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
