"""ChunkReuseCache on a GPU: the same promises, and chunks that rest elsewhere."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import ChunkReuseCache, ChunkStore

from ..harness import assert_same_bits, dtype_id, forward, generate, prompt, tiny_llama
from .test_chunk_reuse import DOCUMENT, last_logits, positions, seen, text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
PLACES = {"gpu": {}, "host": {"device": "cpu"}, "packed": {"codec": "gaac"}}


@every_dtype
@pytest.mark.parametrize("place", PLACES)
def test_an_exact_prefix_is_dynamic_cache_s_bit_for_bit(dtype, place):
    model = tiny_llama(dtype).cuda()
    first = text(10, DOCUMENT, 9).cuda()
    store = seen(model, first, **PLACES[place])
    ids = torch.cat([first[:, :100], prompt(31, seed=77).cuda()], 1)
    theirs = DynamicCache()
    forward(model, first, theirs)
    theirs.crop(100 - first.shape[1])
    expected = last_logits(model, ids[:, 100:], theirs)
    mine = ChunkReuseCache(model, store)
    assert_same_bits(last_logits(model, ids, mine).cpu(), expected.cpu())
    assert mine.report().exact_tokens == 100
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert_same_bits(layer.keys.cpu(), other.keys.cpu())
        assert_same_bits(layer.values.cpu(), other.values.cpu())


@every_dtype
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_moved_text_turned_and_recomputed(dtype, attention):
    model = tiny_llama(dtype).cuda()
    model.set_attn_implementation(attention)
    store = seen(model, text(10, DOCUMENT, 9).cuda())
    ids = text(33, DOCUMENT, 12).cuda()
    plain, moved = DynamicCache(), ChunkReuseCache(model, store, repair="none")
    expected = last_logits(model, ids, plain)
    last_logits(model, ids, moved)
    assert moved.report().moved_tokens == 200
    got, want = moved.layers[0].keys.float(), plain.layers[0].keys.float()
    rounding = 1e-5 if dtype == torch.float32 else 2**-6
    assert ((got - want).abs() <= rounding * (1 + want.abs().amax(-1, keepdim=True))).all()
    store = seen(model, text(10, DOCUMENT, 9).cuda())
    whole = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    error = (last_logits(model, ids, whole) - expected).abs().max()
    assert error <= (1e-4 if dtype == torch.float32 else 0.1) * expected.abs().max()


def test_padded_batches_and_the_next_turn():
    model = tiny_llama().cuda()
    first = text(10, DOCUMENT, 9)
    rows = [text(33, DOCUMENT, 12), text(first, 3), text(60, 70)]
    width = max(row.shape[1] for row in rows)
    batch = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = {"attention_mask": (batch != 0).long().cuda(),
            "position_ids": positions(batch)["position_ids"].cuda()}  # fmt: skip
    store = seen(model, first.cuda())
    cache = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    got = last_logits(model, batch.cuda(), cache, **mask)
    expected = last_logits(model, batch.cuda(), DynamicCache(), **mask)
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (cache.report().exact_tokens, cache.report().moved_tokens) == (219, 200)
    conversation = generate(model, first.cuda(), ChunkReuseCache(model, store))
    again = ChunkReuseCache(model, store)
    last_logits(model, conversation, again)
    assert again.report().exact_tokens == conversation.shape[1] - 1


def test_a_cpu_s_chunks_are_no_gpu_s():
    """They round otherwise, so they do not share what is called exact."""
    model, store = tiny_llama(), ChunkStore()
    ids = text(10, DOCUMENT, 9)
    for where in ("cpu", "cuda"):
        model = model.to(where)
        cache = ChunkReuseCache(model, store)
        last_logits(model, ids.to(where), cache)
        assert cache.report().exact_tokens == 0
        del cache
