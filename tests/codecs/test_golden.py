"""Bytes written by every released version keep decoding. A new format is a new version with files
of its own.

``python -m tests.codecs.test_golden`` writes files that are missing; it never replaces one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_kvcodecs.codecs import codec_for, codec_from_config
from hf_kvcodecs.codecs.words import to_words
from hf_kvcodecs.layouts import PackedBlocks

from ..harness import EXACT_DTYPES, assert_same_bits, decoded

GOLDEN = Path(__file__).parent.parent / "golden"
FILES = sorted(p for p in GOLDEN.glob("*/v*/*.safetensors") if p.parts[-3] != "gaac_cache")
GROUPS = ("planes", "pools", "counts")


def golden_words(dtype: torch.dtype) -> torch.Tensor:
    """Numbers from integer arithmetic alone: ordinary ones, zeros, outliers, infinities and NaN
    payloads."""
    index = torch.arange(2 * 1 * 2 * 32 * 6)
    mixed = (index * 2654435761) % 4294967296
    values = ((mixed % 1000) - 500).double() * torch.exp2(-((mixed >> 10) % 12).double())
    values[index % 37 == 0] = 0.0
    values[index % 211 == 0] *= 1e6
    words = to_words(values.to(dtype))
    patterns = mixed.to(torch.int64) >> 7
    odd = index % 97 == 0
    words[odd] = patterns[odd].to(words.dtype)
    return words.view(2, 1, 2, 32, 6)


@pytest.mark.compat
@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: "-".join(path.relative_to(GOLDEN).with_suffix("").parts)
)
def test_golden_bytes_decode(path):
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        pool_counts = json.loads(file.metadata()["pool_counts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    words = tensors.pop("words")
    groups = {
        group: {
            name.removeprefix(f"{group}."): t
            for name, t in tensors.items()
            if name.startswith(group)
        }
        for group in GROUPS
    }
    packed = PackedBlocks(**groups, pool_counts=pool_counts)
    codec = codec_from_config(config)
    codec.check(packed, words.shape[-1])
    assert_same_bits(decoded(codec, packed, words.shape[-1]), words)
    written = codec.encode(words)
    for group in GROUPS:
        for name, tensor in getattr(written, group).items():
            assert_same_bits(tensor, groups[group][name])


def test_each_codec_has_golden_bytes_of_its_current_version():
    found = {str(path.relative_to(GOLDEN)) for path in FILES}
    assert {name for name, _ in golden_codecs()} <= found


def golden_codecs():
    for dtype in [*EXACT_DTYPES, torch.float64]:
        codec = codec_for(dtype, block_tokens=32)
        yield f"{codec.id}/v{codec.version}/{str(dtype).removeprefix('torch.')}.safetensors", codec


if __name__ == "__main__":
    for name, codec in golden_codecs():
        path = GOLDEN / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            words = golden_words(codec.dtype)
            packed = codec.encode(words)
            tensors = {
                f"{g}.{n}": t.contiguous() for g in GROUPS for n, t in getattr(packed, g).items()
            }
            metadata = {
                "config": json.dumps(codec.config()),
                "pool_counts": json.dumps(packed.pool_counts),
            }
            save_file(tensors | {"words": words}, path, metadata=metadata)
            print("wrote", path)
