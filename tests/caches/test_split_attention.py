"""History and new tokens attended to apart and merged: what one masked call gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_kvcodecs import SpeculativeKVCache
from hf_kvcodecs.caches.attention_view import SDPACall
from hf_kvcodecs.caches.split_attention import FROM_TOKENS, split_attention

from ..harness import forward, prompt, tiny_llama

pytestmark = pytest.mark.compat


def case(new=9, known=FROM_TOKENS + 37, heads=2, groups=3, padding=0):
    torch.manual_seed(0)
    query = torch.randn(1, heads * groups, new, 32)
    # Token-major, as staging slots are.
    keys, values = (torch.randn(known + new, 1, heads, 32).permute(1, 2, 0, 3) for _ in range(2))
    token = torch.arange(known + new)
    mask = (token <= token[known:, None]) & (token >= padding)
    return query, keys, values, mask[None, None]


@pytest.mark.parametrize("padding", [0, 1, 50])
@pytest.mark.parametrize("new", [2, 26])
def test_against_one_masked_call(padding, new):
    query, keys, values, mask = case(new=new, padding=padding)
    out = split_attention(query, keys, values, SDPACall(mask, scale=0.3))
    repeated = (part.repeat_interleave(3, 1) for part in (keys, values))
    expected = F.scaled_dot_product_attention(query, *repeated, mask, scale=0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_masks_of_one_text_are_looked_at_once():
    """A verification's mask tells what the next one's does, until something else is read."""
    cache = SpeculativeKVCache(compressor="knorm")
    model, ids = tiny_llama(), prompt(12)
    forward(model, ids, cache)
    layer, faces = cache.layers[0], cache.faces
    query, keys, values, mask = case(padding=5)
    plane = SDPACall(mask[0, 0])  # what sdpa takes too, and this does not
    assert split_attention(query, keys, values, plane, look=layer._first_seen) is None
    assert not faces.starts
    out = split_attention(query, keys, values, SDPACall(mask), look=layer._first_seen)
    assert faces.starts == {0: 5}
    unseen = SDPACall(torch.zeros_like(mask))  # not looked at
    again = split_attention(query, keys, values, unseen, look=layer._first_seen)
    assert torch.equal(out, again)
    forward(model, ids[:, :2], cache)
    assert not faces.starts


def test_what_it_leaves_alone():
    query, keys, values, mask = case()
    assert split_attention(query, keys, values, SDPACall(mask)) is not None
    holes = mask.clone()
    holes[..., 100] = False
    for call in (SDPACall(holes), SDPACall(None), SDPACall(mask, dropout_p=0.1)):
        assert split_attention(query, keys, values, call) is None
    assert split_attention(*case(known=100)[:3], SDPACall(case(known=100)[3])) is None
    for new in (1, 513):
        other = case(new=new)
        assert split_attention(*other[:3], SDPACall(other[3])) is None
