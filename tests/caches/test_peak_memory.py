"""A decode step never holds more than one dense layer beside the packed history."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_kvcodecs import GAACCache

from ..harness import dtype_id


def most_bytes_held(function) -> int:
    """The peak of what ``function`` allocates through torch, what it frees again taken off."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = []
    nodes = list(profiler.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        if node.name == "[memory]":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
    held = peak = 0
    for _, size in sorted(events):
        held += size
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("backend", ["compile"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_one_dense_layer_and_its_escapes(dtype, backend):
    layers, states = 4, torch.randn(1, 2, 2048, 64).to(dtype)
    cache = GAACCache(backend=backend)
    for idx in range(layers):
        cache.update(states, states, idx)

    def attend(idx: int) -> None:
        keys, values = cache.update(states[:, :, :1], states[:, :, :1], idx)
        torch.nn.functional.scaled_dot_product_attention(states[:, :, :1], keys, values)

    def step() -> None:
        for idx in range(layers):  # keys and values die between the layers, as in a model
            attend(idx)

    step()  # compiles
    dense_layer = 2 * states.nbytes
    # One 16-bit word for every 16 numbers of keys and values while they are decoded, and change.
    escapes = 2 * states.numel() // 8
    assert dense_layer <= most_bytes_held(step) < dense_layer + 1.3 * escapes
