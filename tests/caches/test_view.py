"""A KVView is a tensor in name: metadata without decoding, exact numbers for everything else."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.view import KVView

from ..harness import assert_same_bits


@pytest.fixture
def view_and_dense():
    """Keys of 40 tokens, 32 of them sealed, as a view and as they were given."""
    cache = GAACCache(block_tokens=16)
    dense = torch.randn(2, 3, 40, 8, dtype=torch.bfloat16)
    view, _ = cache.update(dense, dense, 0)
    view, _ = cache.update(dense[:, :, :1], dense[:, :, :1], 0)
    return view, torch.cat([dense, dense[:, :, :1]], dim=2)


def test_metadata_costs_no_decoding(view_and_dense):
    view, dense = view_and_dense
    assert isinstance(view, KVView)
    assert view.shape == dense.shape
    assert view.shape[-2] == view.size(2) == 41
    assert (view.dtype, view.device, view.layout) == (dense.dtype, dense.device, dense.layout)
    assert (view.ndim, view.dim(), view.numel(), len(view)) == (4, 4, dense.numel(), 2)
    assert view.stride() == dense.stride()
    assert view.is_contiguous()
    assert view.element_size() == 2
    assert view.is_floating_point()
    assert not view.requires_grad
    assert not view.is_cuda
    assert "32 of 41 tokens packed" in repr(view)
    assert view.source._dense is None, "one of these decoded the view"


OPERATIONS = {
    "slice": lambda x: x[:, :, 3:20],
    "add": lambda x: x + 1,
    "transpose": lambda x: x.transpose(1, 2),
    "expand": lambda x: x[:, :, None].expand(2, 3, 2, 41, 8).reshape(2, 6, 41, 8),
    "cat": lambda x: torch.cat([x, x], dim=2),
    "matmul": lambda x: torch.matmul(x, x.transpose(-1, -2)),
    "to": lambda x: x.to(torch.float32),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(x[:, :, :1], x, x),
    "aten": lambda x: torch.ops.aten.mul.Tensor(x, 2),
    "deepcopy": copy.deepcopy,
    "numpy": lambda x: torch.from_numpy(x.float().numpy()),
    "parameter-order": lambda x: torch.mul(2, x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_see_the_exact_numbers(view_and_dense, name):
    view, dense = view_and_dense
    result = OPERATIONS[name](view)
    assert type(result) is torch.Tensor
    assert_same_bits(result, OPERATIONS[name](dense))


def test_data_pointer_and_storage_are_real(view_and_dense):
    view, _ = view_and_dense
    assert view.data_ptr() != 0
    assert view.untyped_storage().nbytes() > 0


def test_keys_and_values_are_decoded_together_once(view_and_dense, monkeypatch):
    from hf_kvcodecs.caches.sequence import PackedSequence

    calls = []
    dense = PackedSequence.dense
    monkeypatch.setattr(PackedSequence, "dense", lambda self: calls.append(1) or dense(self))
    cache = GAACCache(block_tokens=16)
    states = torch.randn(1, 2, 40, 8)
    cache.update(states, states, 0)
    calls.clear()
    keys, values = cache.update(states, states, 0)
    torch.nn.functional.scaled_dot_product_attention(states, keys, values)
    assert len(calls) == 1


def test_an_earlier_view_outlives_later_updates_and_crops():
    cache = GAACCache(block_tokens=16)
    states = torch.randn(1, 2, 50, 8)
    cache.update(states, states, 0)
    view, _ = cache.update(states, states, 0)
    cache.crop(-70)
    cache.update(states * 2, states, 0)
    assert_same_bits(view + 0, torch.cat([states, states], dim=2))
