"""Packed blocks in host memory: on a GPU, or with the kernels interpreted."""

from __future__ import annotations

import copy
import gc
import os
import weakref

import pytest
import torch

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches import fused, lazy_attention
from hf_kvcodecs.caches.offloaded import OffloadedPair, Staging

from ..harness import assert_same_bits, forward, generate, tiny_llama
from ..kernels.register_cases import adversarial, ordinary

pytest.importorskip("triton", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 runs these on a CPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fused_on_cpu(monkeypatch):
    monkeypatch.setattr(fused, "fused_device", lambda device: True)


def states(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = ordinary(*shape, seed)
    return keys.to(DEVICE), values.to(DEVICE)


def check(pair: OffloadedPair, keys: torch.Tensor, values: torch.Tensor) -> None:
    found = pair.dense()
    assert pair.tokens == keys.shape[2]
    assert_same_bits(found[0], keys)
    assert_same_bits(found[1], values)
    assert pair.host.words.device.type == pair.host.pool.device.type == "cpu"
    assert pair.host.words.is_pinned() == (DEVICE == "cuda")


def test_three_layers_take_turns_in_two_slots():
    staging = Staging()
    layers = [states(1, 1, 320, 64, seed=seed) for seed in range(3)]
    layers[1][0][:, :, 128:256] = adversarial(64)["every pattern"][0].to(DEVICE)  # a raw block
    pairs = [OffloadedPair(*layer, staging) for layer in layers]
    held = 0
    for count in (200, 1, 119):
        for pair, layer in zip(pairs, layers, strict=True):
            pair.append(*(x[:, :, held : held + count] for x in layer))
        held += count
        for pair, layer in zip(pairs, layers, strict=True):
            check(pair, *(x[:, :, :held] for x in layer))
    assert sum(pair._on_device is not None for pair in pairs) <= 2
    cropped = pairs[1].crop(150)
    assert isinstance(cropped, OffloadedPair)
    check(cropped, *(x[:, :, :150] for x in layers[1]))
    check(pairs[2], *layers[2])


def test_rows_of_the_batch_and_copies():
    keys, values = states(2, 1, 200, 64)
    pair = OffloadedPair(keys, values, Staging()).append(keys, values)
    twin = copy.deepcopy(pair)
    assert twin.staging is not pair.staging
    for index in ([1, 0], [1, 1], [0, 0, 1]):
        pair = pair.select_batch(torch.tensor(index))
        assert isinstance(pair, OffloadedPair)
        keys, values = keys[index], values[index]
        check(pair, keys, values)
    more = states(3, 1, 60, 64, seed=5)
    pair.append(*more)
    check(pair, torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2))
    assert twin.batch == 2


def test_generate_is_that_of_a_cache_on_the_device():
    model = tiny_llama(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        num_hidden_layers=3,
    ).to(DEVICE, torch.bfloat16)  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 100, (1, 200), generator=generator).to(DEVICE)
    expected = generate(model, ids, GAACCache(), max_new_tokens=4)
    before = lazy_attention.calls.copy()
    cache = GAACCache(offload="cpu")
    assert torch.equal(generate(model, ids, cache, max_new_tokens=4), expected)
    done = lazy_attention.calls - before
    assert (done["fused"], done["dense"]) == (3 * 3, 0)
    reference = GAACCache()
    generate(model, ids, reference, max_new_tokens=4)
    twin = copy.deepcopy(cache)
    forward(model, ids[:, :3], cache)
    for idx in range(3):
        keys, values = reference.dense(idx)
        assert_same_bits(twin.dense(idx)[0], keys)
        assert_same_bits(cache.dense(idx)[1][:, :, : keys.shape[2]], values)
    assert cache.memory().packed_elements > 0


def test_nothing_keeps_a_cache_alive():
    keys, values = states(1, 1, 330, 64)
    gc.disable()
    try:
        cache = GAACCache(offload="cpu")
        cache.update(keys, values, 0)
        cache.update(keys, values, 1)
        words = weakref.ref(cache.layers[0].pair.host.words)
        cache.dense(0)
        del cache
        assert words() is None
    finally:
        gc.enable()


def test_what_cannot_be_offloaded_says_so(caplog):
    if DEVICE == "cpu":
        pytest.skip("needs a device that is not the host")
    keys, values = (x.float() for x in states(1, 1, 200, 64))
    cache = GAACCache(offload="cpu")
    cache.update(keys, values, 0)
    assert any("can be offloaded" in record.message for record in caplog.records)
    assert_same_bits(cache.dense(0)[0], keys)
