"""A saved cache returns bit for bit; anything else in its place is refused, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

from hf_kvcodecs import CacheMisuseError, CorruptDataError, GAACCache, UnsupportedLayoutError
from hf_kvcodecs.caches.files import _digest

from ..harness import (
    assert_same_bits,
    assert_same_contents,
    dtype_id,
    filled_pair,
    forward,
    prompt,
    tiny_llama,
)
from .test_generate import tiny_gemma

GOLDEN = Path(__file__).parent.parent / "golden" / "gaac_cache"


def saved(tmp_path, model, tokens=50, **options):
    """A cache that saw some tokens, and its file."""
    cache, _ = filled_pair(model, prompt(tokens, 2), block_tokens=16, **options)
    cache.save(tmp_path / "cache.safetensors")
    return cache, tmp_path / "cache.safetensors"


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("tokens", [1, 16, 50])
def test_round_trip_and_going_on(tmp_path, tiny_models, dtype, tokens):
    model = tiny_models[dtype]
    cache, path = saved(tmp_path, model, tokens)
    loaded = GAACCache.load(path)
    _, dynamic = filled_pair(model, prompt(tokens, 2))
    assert_same_contents(loaded, dynamic)
    assert loaded.options.block_tokens == 16
    assert loaded.memory() == cache.memory()
    step = prompt(30, 2, seed=3)
    assert_same_bits(forward(model, step, loaded), forward(model, step, dynamic))


def test_fp8_raw_blocks_and_two_sequences_round_trip(tmp_path):
    cache = GAACCache(block_tokens=16, kv_dtype="fp8_e4m3")
    cache.update(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 6), 0)
    cache.save(tmp_path / "a")
    wild = GAACCache(block_tokens=16)
    bits = torch.randint(-(2**15), 2**15, (1, 2, 40, 8)).to(torch.int16).view(torch.bfloat16)
    wild.update(bits, bits, 0)
    wild.save(tmp_path / "b")
    for before, name in ((cache, "a"), (wild, "b")):
        after = GAACCache.load(tmp_path / name)
        for old, new in zip(before.dense(0), after.dense(0), strict=True):
            assert_same_bits(new, old)


def test_sliding_window_layers_are_saved_too(tmp_path):
    model = tiny_gemma()
    caches = [GAACCache(model.config, block_tokens=16), DynamicCache(config=model.config)]
    for cache in caches:
        forward(model, prompt(50), cache)
    caches[0].save(tmp_path / "cache")
    loaded = GAACCache.load(tmp_path / "cache", config=model.config)
    for step in range(3):
        ids = prompt(9, seed=step)
        assert_same_bits(forward(model, ids, loaded), forward(model, ids, caches[1]))
    with pytest.raises(CacheMisuseError, match=r"config=model.config"):
        GAACCache.load(tmp_path / "cache")


def test_an_empty_cache_round_trips(tmp_path):
    GAACCache(block_tokens=32).save(tmp_path / "cache")
    assert GAACCache.load(tmp_path / "cache").get_seq_length() == 0


def test_another_models_file_is_refused(tmp_path, tiny_models):
    model = tiny_llama()
    model.config.name_or_path = "somewhere/tiny"
    cache = GAACCache(model.config, block_tokens=16)
    forward(model, prompt(40), cache)
    cache.save(tmp_path / "cache")
    moved = tiny_llama()
    moved.config.name_or_path = "/elsewhere/tiny"
    assert GAACCache.load(tmp_path / "cache", config=moved.config).get_seq_length() == 40
    renamed = tiny_llama()
    renamed.config.name_or_path = "somewhere/tiny-instruct"
    other = tiny_llama(max_position_embeddings=4096)
    for config in (renamed.config, other.config):
        with pytest.raises(CacheMisuseError, match="filled by another model"):
            GAACCache.load(tmp_path / "cache", config=config)
    wider = tiny_llama(num_key_value_heads=4)
    with pytest.raises(CacheMisuseError, match="filled by another model"):
        forward(wider, prompt(3), GAACCache.load(tmp_path / "cache"))


def rewritten(path, change):
    """The file with its metadata and tensors passed through ``change``."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(metadata, tensors)
    save_file(tensors, path, metadata=metadata)


def redigested(path, change):
    """Like ``rewritten``, with a digest that fits: only the contents' own checks can refuse it."""

    def and_sign(metadata, tensors):
        described = json.loads(metadata["description"])
        change(described, tensors)
        metadata["description"] = json.dumps(described)
        metadata["sha256"] = _digest(metadata["description"], tensors)

    rewritten(path, and_sign)


@pytest.mark.parametrize("size", [0, 4, 100, 5000, -1])
def test_truncated_files(tmp_path, tiny_models, size):
    _, path = saved(tmp_path, tiny_models[torch.bfloat16])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptDataError):
        GAACCache.load(path)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9, 0.999])
def test_one_flipped_bit(tmp_path, tiny_models, place):
    _, path = saved(tmp_path, tiny_models[torch.bfloat16])
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 16
    path.write_bytes(data)
    with pytest.raises(CorruptDataError):
        GAACCache.load(path)


def test_foreign_and_missing_files(tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptDataError, match="not one that GAACCache"):
        GAACCache.load(tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CorruptDataError, match="not a readable safetensors file"):
        GAACCache.load(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="no such file"):
        GAACCache.load(tmp_path / "nothing")


def test_a_newer_version_is_refused_by_name(tmp_path, tiny_models):
    _, path = saved(tmp_path, tiny_models[torch.bfloat16])
    rewritten(path, lambda metadata, tensors: metadata.update(version="2"))
    with pytest.raises(UnsupportedLayoutError, match="version 2 is not supported"):
        GAACCache.load(path)


CONTRADICTIONS = {
    "missing-tail": lambda d, t: t.pop("layers.0.0.tail"),
    "missing-plane": lambda d, t: t.pop("layers.0.0.0.planes.bits"),
    "short-pool": lambda d, t: t.update(
        {"layers.0.0.0.pools.escapes": t["layers.0.0.0.pools.escapes"][1:]}
    ),
    "extra-tensor": lambda d, t: t.update({"layers.9.0.tail": torch.zeros(3)}),
    "two-axis-pool": lambda d, t: t.update(
        {"layers.0.0.0.pools.escapes": t["layers.0.0.0.pools.escapes"][None]}
    ),
    "bool-counts": lambda d, t: t.update(
        {"layers.0.0.0.counts.patches": t["layers.0.0.0.counts.patches"].bool()}
    ),
    "model-a-string": lambda d, t: d.update(model="x"),
    "no-layers": lambda d, t: d.pop("layers"),
    "layers-a-number": lambda d, t: d.update(layers=3),
    "no-codec": lambda d, t: d["layers"][0]["sequences"][0].pop("codec"),
    "unknown-option": lambda d, t: d["options"].update(colour="red"),
    "bad-option": lambda d, t: d["options"].update(block_tokens=7),
    "other-length": lambda d, t: t.update(
        {"layers.1.0.tail": t["layers.1.0.tail"][:, :, 1:].contiguous()}
    ),
    "odd-rows": lambda d, t: t.update({"layers.1.0.tail": t["layers.1.0.tail"][:1]}),
    "wrong-dtype": lambda d, t: d["layers"][0]["sequences"][0].update(dtype="int3"),
    "other-dtype": lambda d, t: d["layers"][0]["sequences"][0].update(dtype="float32"),
    "unknown-codec": lambda d, t: d["layers"][0]["sequences"][0]["codec"].update(id="lz77"),
    "other-block": lambda d, t: d["layers"][0]["sequences"][0]["segments"][0].update(
        block_tokens=32
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_contents_with_a_fitting_digest(tmp_path, tiny_models, name):
    _, path = saved(tmp_path, tiny_models[torch.bfloat16])
    redigested(path, CONTRADICTIONS[name])
    with pytest.raises(CorruptDataError):
        GAACCache.load(path)


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}", "nonsense"])
def test_descriptions_that_are_none(tmp_path, tiny_models, text):
    _, path = saved(tmp_path, tiny_models[torch.bfloat16])

    def replace_description(metadata, tensors):
        metadata.update(description=text, sha256=_digest(text, tensors))

    rewritten(path, replace_description)
    with pytest.raises(CorruptDataError, match="description"):
        GAACCache.load(path)


def test_places_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(FileNotFoundError, match="a folder that exists"):
            GAACCache().save(path)


def test_layers_of_different_lengths_are_not_saved(tmp_path):
    cache = GAACCache(block_tokens=16)
    states = torch.randn(1, 2, 20, 8)
    cache.update(states, states, 0)
    cache.update(states, states, 1)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match="different batch sizes or lengths"):
        cache.save(tmp_path / "cache")


def test_fields_that_do_not_matter_do_not_refuse(tmp_path):
    model = tiny_llama()
    cache = GAACCache(model.config, block_tokens=16)
    forward(model, prompt(40), cache)
    cache.save(tmp_path / "cache")
    model.config.output_hidden_states = True
    model.config.attention_dropout = 0.1
    assert GAACCache.load(tmp_path / "cache", config=model.config).get_seq_length() == 40


def test_a_failed_save_leaves_the_old_file(tmp_path, tiny_models, monkeypatch):
    cache, path = saved(tmp_path, tiny_models[torch.bfloat16])
    before = path.read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_kvcodecs.caches.files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        cache.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_linear_attention_state_is_refused(tmp_path):
    from transformers import Lfm2Config

    cache = GAACCache(Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]))
    with pytest.raises(ValueError, match="cannot be saved"):
        cache.save(tmp_path / "cache")


@pytest.mark.compat
def test_a_file_of_version_1_still_loads():
    """Written by release 0.1.0: bf16, 2 rows, 37 tokens in blocks of 16."""
    cache = GAACCache.load(GOLDEN / "v1" / "bfloat16.safetensors")
    for found, wanted in zip(cache.dense(0), golden_states(), strict=True):
        assert_same_bits(found, wanted)


def golden_states() -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(2 * 2 * 37 * 8)
    mixed = (index * 2654435761) % 4294967296
    values = ((mixed % 1000) - 500).double() * torch.exp2(-((mixed >> 10) % 12).double())
    keys = values.to(torch.bfloat16).view(2, 2, 37, 8)
    return keys, keys.flip(2).contiguous()


if __name__ == "__main__":
    path = GOLDEN / "v1" / "bfloat16.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        golden = GAACCache(block_tokens=16)
        golden.update(*golden_states(), 0)
        golden.save(path)
