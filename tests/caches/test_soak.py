"""Many generations one behind the other: memory stays what it was, and a cache that is gone leaves
nothing, without the garbage collector."""

from __future__ import annotations

import copy
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from hf_kvcodecs import BlockPool, GAACCache
from hf_kvcodecs.caches.fused import FusedPair
from hf_kvcodecs.caches.offloaded import OffloadedPair
from hf_kvcodecs.caches.pair import KVPair
from hf_kvcodecs.caches.pooled import PooledPair
from hf_kvcodecs.caches.static_pair import StaticPair

from ..harness import generate, prompt, tiny_llama
from ..kernels.references import references_for_kernels

KINDS = {"plain": KVPair, "fused": FusedPair, "offloaded": OffloadedPair, "pooled": PooledPair}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def model(device: str = "cpu"):
    return tiny_llama(
        torch.bfloat16, hidden_size=128, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    ).to(device)  # fmt: skip


def makers(config, device: str) -> dict[str, Callable[[], GAACCache]]:
    pool = BlockPool(config, tokens=4000, rows=3, device=device)
    return {
        "plain": lambda: GAACCache(backend="torch"),
        "fused": GAACCache,
        "captured": lambda: GAACCache(config, max_tokens=300),
        "offloaded": lambda: GAACCache(offload="cpu"),
        "pooled": lambda: GAACCache(pool=pool, max_tokens=300),
    }


def tensors(pair: object) -> list[torch.Tensor]:
    """What a pair holds of its own: not the pool's memory."""
    if isinstance(pair, KVPair):
        return [sequence.tail for sequence in pair.sequences]
    if isinstance(pair, StaticPair):
        return [pair.memory.memory]
    own = [pair.blocks.table]
    if isinstance(pair, OffloadedPair):
        own += [pair.host.words, pair.host.raw]
    return own if isinstance(pair, PooledPair) else [*own, pair.tail]


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def generation(spoken, new: Callable[[], GAACCache], seed: int, kind: type) -> list[weakref.ref]:
    """One prompt and some tokens, with a copy of the cache; weak references to all that was
    held."""
    cache = new()
    # Few lengths, each seen early: torch keeps something on a CPU for every shape of a product.
    ids = prompt(200 + 7 * (seed % 8), seed=seed).to(spoken.device)
    generate(spoken, ids, cache, max_new_tokens=3)
    twin = copy.deepcopy(cache)
    held: list[weakref.ref] = []
    for each in (cache, twin):
        for layer in each.layers:
            assert type(layer.pair) is kind
            held += [weakref.ref(each), weakref.ref(layer.pair)]
            held += [weakref.ref(tensor) for tensor in tensors(layer.pair)]
    return held


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_flat(name, monkeypatch):
    """Two hundred generations in all, and a copy of each cache."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has a test of its own below")
    pytest.importorskip("triton", reason="needs Triton")
    references_for_kernels(monkeypatch.setattr)
    spoken = model()
    new = makers(spoken.config, "cpu")[name]
    rounds = 50
    traced = []
    with no_garbage_collector():
        for number in range(rounds):
            held = generation(spoken, new, number, KINDS[name])
            alive = [reference() for reference in held if reference() is not None]
            assert not alive, f"{len(alive)} of {len(held)} alive, {type(alive[0])}"
            if number in (rounds // 2, rounds - 1):
                gc.collect()
                if number == rounds // 2:
                    tracemalloc.start()
                traced.append(resident_bytes())
        # Python's own objects since the middle: a leak of one small object per token would be more.
        assert tracemalloc.get_traced_memory()[0] < 200_000
        tracemalloc.stop()
    assert traced[1] - traced[0] < 16 << 20


def resident_bytes() -> int:
    """Of this process, 0 where that cannot be read."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [*KINDS, "captured"])
def test_memory_of_a_gpu_is_flat(name):
    spoken = model("cuda")
    new = makers(spoken.config, "cuda")[name]
    kind = (KINDS | {"captured": StaticPair})[name]
    with no_garbage_collector():
        for number in range(5):
            generation(spoken, new, number, kind)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for number in range(200 if name != "captured" else 40):
            held = generation(spoken, new, 0 if name == "captured" else number, kind)
            assert not [reference() for reference in held if reference() is not None]
            torch.cuda.synchronize()
            if name == "captured" and number < 20:  # graphs are being recorded
                before = torch.cuda.memory_allocated()
            assert torch.cuda.memory_allocated() == before, f"generation {number}"
