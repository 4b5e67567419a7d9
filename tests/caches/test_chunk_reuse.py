"""ChunkReuseCache: exact where it says so, repaired where text moved, never wrong."""

from __future__ import annotations

import copy
import gc
import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import CacheMisuseError, ChunkReuseCache, ChunkStore
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.store import FixedChunker, hashing
from hf_kvcodecs.store.hashing import PROBE_TOKENS

from ..harness import assert_same_bits, dtype_id, forward, generate, prompt, tiny_llama

DTYPES = [torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
DOCUMENT = prompt(200, seed=5)


def text(*parts: torch.Tensor | int) -> torch.Tensor:
    """Token ids ``[1, tokens]``: given parts, and so many tokens of a text of that number's own."""
    return torch.cat([prompt(p, seed=300 + p) if isinstance(p, int) else p for p in parts], 1)


def seen(model, *texts: torch.Tensor, **options: object) -> ChunkStore:
    """A store that has seen ``texts``."""
    store = ChunkStore(**options)
    for ids in texts:
        forward(model, ids, ChunkReuseCache(model, store), logits_to_keep=1)
    return store


def last_logits(model, ids: torch.Tensor, cache: object, **options: object) -> torch.Tensor:
    return forward(model, ids, cache, logits_to_keep=1, **options)


@pytest.mark.compat
@every_dtype
@pytest.mark.parametrize("shared", [1, 100, 219])
def test_an_exact_prefix_is_dynamic_cache_s_prefix_reuse_bit_for_bit(tiny_models, dtype, shared):
    """The KV bits of a real prefill, and the very logits of a DynamicCache that holds them."""
    model = tiny_models[dtype]
    first = text(10, DOCUMENT, 9)
    store = seen(model, first)
    ids = torch.cat([first[:, :shared], prompt(31, seed=77)], 1)
    theirs = DynamicCache()
    forward(model, first, theirs)
    theirs.crop(shared - first.shape[1])
    expected = last_logits(model, ids[:, shared:], theirs)
    mine = ChunkReuseCache(model, store)
    assert_same_bits(last_logits(model, ids, mine), expected)
    assert mine.report().exact_tokens == shared
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert_same_bits(layer.keys, other.keys)
        assert_same_bits(layer.values, other.values)


@pytest.mark.compat
@every_dtype
def test_generate_says_what_dynamic_cache_says(tiny_models, dtype):
    model = tiny_models[dtype]
    store = ChunkStore()
    ids = text(10, DOCUMENT, 9)
    expected = generate(model, ids, DynamicCache())
    for exact in (0, 218):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, ids, cache), expected)
        assert cache.report().exact_tokens == exact


@pytest.mark.compat
def test_recomputing_every_row_is_plain_prefill_bit_for_bit(tiny_models):
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(33, DOCUMENT, 12)
    cache = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    assert torch.equal(last_logits(model, ids, cache), last_logits(model, ids, DynamicCache()))
    report = cache.report()
    assert report.moved_tokens == report.recomputed_tokens == 200


@pytest.mark.compat
@every_dtype
@pytest.mark.parametrize("header", [1, 7, 33, 130])
def test_moved_text_is_found_behind_any_header_and_keys_are_turned(tiny_models, dtype, header):
    """Layer 0 depends on token and position alone: there the moved keys are the right ones."""
    model = tiny_models[dtype]
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(header, DOCUMENT, 12)
    cache, plain = ChunkReuseCache(model, store, repair="none"), DynamicCache()
    last_logits(model, ids, cache)
    last_logits(model, ids, plain)
    assert cache.report().moved_tokens == 200
    got, expected = cache.layers[0].keys.float(), plain.layers[0].keys.float()
    rounding = 1e-5 if dtype == torch.float32 else 2**-6
    assert ((got - expected).abs() <= rounding * (1 + expected.abs().amax(-1, keepdim=True))).all()
    assert_same_bits(cache.layers[0].values, plain.layers[0].values)


@every_dtype
def test_many_chunks_make_what_one_makes(tiny_models, dtype):
    """An exact prefix, two moved spans of one text and one of another, however they are cut."""
    model = tiny_models[dtype]
    first, other = text(10, DOCUMENT, 9), prompt(90, seed=50)
    ids = torch.cat([first[:, :100], text(5, DOCUMENT[:, 20:], 3, other, 7)], 1)

    def states(chunker):
        store = seen(model, first, other, chunker=chunker)
        cache = ChunkReuseCache(model, store, repair="none")
        last_logits(model, ids, cache)
        assert (cache.report().exact_tokens, cache.report().moved_tokens) == (100, 270)
        return [t for la in cache.layers for t in (la.keys, la.values)]

    few, many = states("document"), states(FixedChunker(tokens=16, window=0))
    for got, expected in zip(many, few, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("repair", ["selective", "cacheblend", "none"])
def test_repair_recomputes_what_it_says(tiny_models, repair):
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    cache = ChunkReuseCache(model, store, repair=repair, recompute_ratio=0.3)
    last_logits(model, text(33, DOCUMENT, 12), cache)
    report = cache.report()
    assert (report.total_tokens, report.moved_tokens) == (245, 200)
    low, high = {"none": (0, 0), "selective": (1, 99), "cacheblend": (60, 159)}[repair]
    assert low <= report.recomputed_tokens <= high
    assert report.computed_tokens == 45 + report.recomputed_tokens
    assert str(report.moved_tokens) in str(report)


def test_repair_exact_uses_no_moved_text(tiny_models):
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(33, DOCUMENT, 12)
    for exact in (0, ids.shape[1] - 1):
        cache = ChunkReuseCache(model, store, repair="exact")
        expected = generate(model, ids, DynamicCache())
        assert torch.equal(generate(model, ids, cache), expected)
        assert (cache.report().exact_tokens, cache.report().moved_tokens) == (exact, 0)


def test_repaired_rows_are_right_where_everything_before_them_is(tiny_models):
    """The first rows of moved text, recomputed, equal those of a plain prefill."""
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    cache, plain = ChunkReuseCache(model, store, repair="selective"), DynamicCache()
    last_logits(model, text(33, DOCUMENT, 12), cache)
    last_logits(model, text(33, DOCUMENT, 12), plain)
    for got, expected in zip(cache.layers, plain.layers, strict=True):
        for name in ("keys", "values"):
            mine, theirs = getattr(got, name)[:, :, :49], getattr(expected, name)[:, :, :49]
            assert torch.allclose(mine, theirs, atol=1e-4)


def test_more_repair_comes_closer(tiny_models):
    model = tiny_models[torch.float32]
    first, ids = text(10, DOCUMENT, 9), text(33, DOCUMENT, 12)
    expected = last_logits(model, ids, DynamicCache()).log_softmax(-1)
    divergences = []
    for ratio in (0.0, 0.5, 1.0):
        cache = ChunkReuseCache(
            model, seen(model, first), repair="cacheblend", recompute_ratio=ratio
        )
        got = last_logits(model, ids, cache).log_softmax(-1)
        divergences.append(float((expected.exp() * (expected - got)).sum()))
    assert divergences[0] > divergences[1] > divergences[2] == 0


@pytest.mark.compat
@every_dtype
def test_left_padded_rows_reuse_each_on_their_own(tiny_models, dtype):
    """One row moved, one with an exact prefix, one never seen; all rows recomputed: as plain."""
    model = tiny_models[dtype]
    first = text(10, DOCUMENT, 9)
    rows = [text(33, DOCUMENT, 12), text(first, 3), text(60, 70)]
    width = max(row.shape[1] for row in rows)
    batch = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    cache = ChunkReuseCache(model, seen(model, first), repair="cacheblend", recompute_ratio=1.0)
    got = last_logits(model, batch, cache, attention_mask=(batch != 0).long(), **positions(batch))
    expected = last_logits(
        model, batch, DynamicCache(), attention_mask=(batch != 0).long(), **positions(batch)
    )
    rounding = 1e-4 if dtype == torch.float32 else 0.1
    assert (got - expected).abs().max() <= rounding * expected.abs().max()
    report = cache.report()
    assert report.total_tokens == sum(row.shape[1] for row in rows)
    assert (report.exact_tokens, report.moved_tokens) == (219, 200)


def positions(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"position_ids": ((batch != 0).long().cumsum(1) - 1).clamp(min=0)}


@pytest.mark.compat
def test_padded_batches_in_generate(tiny_models):
    model = tiny_models[torch.float32]
    first = text(10, DOCUMENT, 9)
    rows = [text(first, 3), text(first, 30)]
    width = max(row.shape[1] for row in rows)
    batch = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    cache = ChunkReuseCache(model, seen(model, first))
    assert torch.equal(generate(model, batch, cache), generate(model, batch, DynamicCache()))
    assert cache.report().exact_tokens == 2 * 219


@pytest.mark.compat
def test_the_next_turn_reuses_everything_up_to_it(tiny_models):
    """The reply's keys and values are stored too, when the cache goes."""
    model = tiny_models[torch.float32]
    store, conversation = ChunkStore(), text(40)
    for turn in range(3):
        cache = ChunkReuseCache(model, store)
        before = conversation.shape[1]
        conversation = generate(model, conversation, cache, max_new_tokens=25)
        assert cache.report().exact_tokens == (before - 11 if turn else 0)
        del cache
        conversation = torch.cat([conversation, prompt(10, seed=turn)], 1)
    expected = generate(model, conversation, DynamicCache())
    assert torch.equal(generate(model, conversation, ChunkReuseCache(model, store)), expected)


def test_one_object_serves_several_turns(tiny_models):
    model = tiny_models[torch.float32]
    cache, plain, ids = ChunkReuseCache(model, ChunkStore()), DynamicCache(), text(40)
    for turn in range(3):
        expected = generate(model, ids, plain, max_new_tokens=12)
        ids = generate(model, ids, cache, max_new_tokens=12)
        assert torch.equal(ids, expected)
        ids = torch.cat([ids, prompt(5, seed=turn)], 1)


def test_text_behind_moved_text_is_stored_but_never_called_exact(tiny_models):
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(33, DOCUMENT, prompt(150, seed=6), 3)
    last_logits(model, ids, ChunkReuseCache(model, store))
    again = ChunkReuseCache(model, store)
    last_logits(model, ids, again)
    assert again.report().exact_tokens == 33
    assert again.report().moved_tokens >= 200 + 149
    elsewhere = ChunkReuseCache(model, store)
    last_logits(model, text(21, prompt(150, seed=6), 4), elsewhere)
    assert elsewhere.report().moved_tokens == 150


def test_interleaved_documents_are_all_found(tiny_models):
    model = tiny_models[torch.float32]
    documents = [prompt(120, seed=50 + i) for i in range(3)]
    store = seen(model, *(text(doc, 9) for doc in documents))
    ids = text(11, documents[2], 13, documents[0], 17, documents[1], 19)
    cache = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    assert torch.equal(last_logits(model, ids, cache), last_logits(model, ids, DynamicCache()))
    assert cache.report().moved_tokens == 360


@pytest.mark.parametrize("options", [
    {"codec": "gaac"}, {"chunker": FixedChunker(tokens=48)}, {"chunker": "document"},
], ids=str)  # fmt: skip
def test_exact_with_every_lossless_codec_and_chunker(tiny_models, options):
    model = tiny_models[torch.bfloat16]
    first = text(10, DOCUMENT, 9)
    store = seen(model, first, **options)
    ids = text(first, 20)
    theirs = DynamicCache()
    forward(model, first, theirs)
    cache = ChunkReuseCache(model, store)
    assert_same_bits(
        last_logits(model, ids, cache), last_logits(model, ids[:, first.shape[1] :], theirs)
    )
    assert cache.report().exact_tokens == first.shape[1]


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.05), ("int4", 0.6)])
def test_lossy_codecs_are_close_and_never_called_exact(tiny_models, codec, bound):
    model = tiny_models[torch.float32]
    first = text(10, DOCUMENT, 9)
    store = seen(model, first, codec=codec)
    cache, ids = ChunkReuseCache(model, store), text(first, 20)
    got, expected = last_logits(model, ids, cache), last_logits(model, ids, DynamicCache())
    assert (got - expected).norm() <= bound * expected.norm()
    report = cache.report()
    assert (report.exact_tokens, report.moved_tokens) == (0, first.shape[1])


def test_a_store_too_small_and_a_chunk_lost_in_between(tiny_models, monkeypatch):
    model = tiny_models[torch.float32]
    first, ids = text(10, DOCUMENT, 9), text(10, DOCUMENT, 12)
    expected = last_logits(model, ids, DynamicCache())
    tiny = seen(model, first, max_bytes=1000)
    assert torch.equal(last_logits(model, ids, ChunkReuseCache(model, tiny)), expected)
    store = seen(model, first, chunker=FixedChunker(tokens=48))
    space = next(iter(store._spaces.values()))
    lost = list(space.index.chunks.values())[2]
    store.drop((space.name, lost.chain))
    cache = ChunkReuseCache(model, store)
    assert torch.allclose(last_logits(model, ids, cache), expected, atol=1e-3)
    assert 0 < cache.report().exact_tokens == lost.position


# Options of generate.


@pytest.mark.compat
@pytest.mark.parametrize("options", [
    {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True, "top_k": 5},
    {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 32},
], ids=["beams", "sequences", "lookup", "chunks"])  # fmt: skip
def test_decoding_methods(tiny_models, options):
    model = tiny_models[torch.float32]
    first, ids = text(10, DOCUMENT, 9), text(10, DOCUMENT, 9, 12)
    store = seen(model, first)
    torch.manual_seed(1)
    expected = generate(model, ids, DynamicCache(), **options)
    torch.manual_seed(1)
    got = generate(model, ids, ChunkReuseCache(model, store), **options)
    assert torch.equal(got, expected)
    again = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, ids, again), generate(model, ids, DynamicCache()))


def test_eager_attention(tiny_models):
    model = tiny_llama(attn_implementation="eager")
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(33, DOCUMENT, 12)
    cache = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    expected = last_logits(model, ids, DynamicCache())
    assert torch.allclose(last_logits(model, ids, cache), expected, atol=1e-4)
    assert cache.report().moved_tokens == 200


def test_inference_mode_and_back(tiny_models):
    model = tiny_models[torch.float32]
    store, ids = ChunkStore(), text(10, DOCUMENT, 9)
    with torch.inference_mode():
        expected = last_logits(model, ids, ChunkReuseCache(model, store))
    moved = ChunkReuseCache(model, store)
    last_logits(model, text(33, DOCUMENT, 12), moved)
    assert moved.report().moved_tokens == 200
    again = ChunkReuseCache(model, store)
    assert torch.allclose(last_logits(model, ids, again), expected, atol=1e-3)


# When nothing may be reused.


@pytest.mark.parametrize(("options", "reason"), [
    ({}, "logits of every token"),
    ({"logits_to_keep": 1, "output_hidden_states": True}, "outputs of every token"),
    ({"logits_to_keep": 1, "token_type_ids": torch.ones(1, 231, dtype=torch.long)}, "token_type"),
    ({"logits_to_keep": 1, "pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values"),
    ({"logits_to_keep": 1, "position_ids": torch.arange(231)[None] * 2}, "count up by one"),
    ({"logits_to_keep": 1, "attention_mask": torch.ones(1, 231).index_fill(
        1, torch.tensor([5]), 0)}, "hides more than padding"),
], ids=["all logits", "hidden states", "token types", "images", "positions", "mask"])  # fmt: skip
def test_what_switches_reuse_off(tiny_models, monkeypatch, options, reason):
    """The model runs as with a DynamicCache, and says why, once."""
    said = []
    monkeypatch.setattr("hf_kvcodecs.caches.chunk_reuse.cache.notice_once", said.append)
    model = tiny_models[torch.float32]
    ids = text(10, DOCUMENT, 9, 12)
    store = seen(model, text(10, DOCUMENT, 9))
    stored = store.stats().stored
    cache = ChunkReuseCache(model, store)
    got, expected = (forward(model, ids, c, **options) for c in (cache, DynamicCache()))
    assert torch.equal(got, expected)
    assert cache.report().exact_tokens == 0
    assert len(said) == 1
    assert reason in said[0]
    del cache
    assert store.stats().stored == stored


def test_inputs_embeds_switch_reuse_off(tiny_models, monkeypatch):
    said = []
    monkeypatch.setattr("hf_kvcodecs.caches.chunk_reuse.cache.notice_once", said.append)
    model = tiny_models[torch.float32]
    store, embeds = ChunkStore(), model.get_input_embeddings()(text(30)).detach()
    options = {"inputs_embeds": embeds, "max_new_tokens": 10, "do_sample": False}
    options["attention_mask"] = torch.ones(1, 30, dtype=torch.long)
    got, expected = (
        model.generate(**options, **{CACHE_ARGUMENT: cache})
        for cache in (ChunkReuseCache(model, store), DynamicCache())
    )
    assert torch.equal(got, expected)
    assert "inputs_embeds" in said[0]
    assert store.stats().stored == 0


def test_logits_of_several_tokens(tiny_models):
    model = tiny_models[torch.float32]
    ids = text(10, DOCUMENT, 9)
    store = seen(model, ids)
    cache = ChunkReuseCache(model, store)
    got = forward(model, ids, cache, logits_to_keep=7)
    assert got.shape[1] == 7
    assert torch.allclose(got, forward(model, ids, DynamicCache(), logits_to_keep=7), atol=1e-3)
    assert cache.report().exact_tokens == 212


def test_misuse_is_refused(tiny_models):
    model = tiny_models[torch.float32]
    cache = ChunkReuseCache(model, ChunkStore())
    with pytest.raises(CacheMisuseError, match="another model object"):
        with ChunkHook(tiny_llama()) as (other, _):
            last_logits(other, text(30), cache)
    with pytest.raises(CacheMisuseError, match="by another model"):
        last_logits(tiny_llama(), text(30), cache)
    with pytest.raises(CacheMisuseError, match="no_grad"):
        model(text(30), **{CACHE_ARGUMENT: cache})
    with pytest.raises(CacheMisuseError, match="use_cache=False"):
        last_logits(model, text(30), cache, use_cache=False)
    with pytest.raises(ValueError, match="repair: expected one of"):
        ChunkReuseCache(model, ChunkStore(), repair="glue")
    with pytest.raises(ValueError, match="recompute_ratio: expected 0 to 1"):
        ChunkReuseCache(model, ChunkStore(), recompute_ratio=15)
    with pytest.raises(TypeError, match="store: expected a ChunkStore"):
        ChunkReuseCache(model, {})
    with pytest.raises(TypeError, match="model: expected the transformers model"):
        ChunkReuseCache(model.config, ChunkStore())


class ChunkHook:
    """A model that has hooks because it has a cache of its own."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.cache = ChunkReuseCache(self.model, ChunkStore())
        return self.model, self.cache

    def __exit__(self, *_):
        del self.cache


def test_a_refusal_changes_nothing(tiny_models):
    model = tiny_models[torch.float32]
    cache, ids = ChunkReuseCache(model, ChunkStore()), text(40)
    last_logits(model, ids, cache)
    expected = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(CacheMisuseError, match="use_cache=False"):
        last_logits(model, prompt(1), cache, use_cache=False)
    for layer, keys in zip(cache.layers, expected, strict=True):
        assert_same_bits(layer.keys, keys)


def test_hooks_are_there_only_while_a_cache_is():
    model = tiny_llama()
    first, second = (ChunkReuseCache(model, ChunkStore()) for _ in range(2))
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    del first
    assert len(model._forward_pre_hooks) == 1
    third = copy.deepcopy(second)
    del second
    assert len(model._forward_pre_hooks) == 1
    del third
    gc.collect()
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 0


def test_a_failed_forward_leaves_nothing_half_done(tiny_models):
    model = tiny_llama()
    store = seen(model, text(10, DOCUMENT, 9))
    cache, ids = ChunkReuseCache(model, store), text(33, DOCUMENT, 12)

    def fail(*_):
        raise RuntimeError("broken")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        last_logits(model, ids, cache)
    handle.remove()
    assert cache.get_seq_length() == 0
    last_logits(model, ids, cache)
    assert cache.report().moved_tokens == 200


# The layer contract.


def test_layer_contract(tiny_models):
    """crop, select, repeat, reorder, reset, deepcopy: as DynamicCache, also behind moved text."""
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(33, DOCUMENT, 12)
    cache, plain = ChunkReuseCache(model, store), DynamicCache()
    last_logits(model, ids, cache)
    for layer in cache.layers:
        plain.update(layer.keys, layer.values, len(plain.layers))
    for step in (
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.reorder_cache(torch.tensor([2, 0, 1])),
        lambda c: c.batch_select_indices(torch.tensor([0, 2])),
        lambda c: c.crop(-20),
        lambda c: c.crop(0),
    ):
        step(cache)
        step(plain)
        twin = copy.deepcopy(cache)
        assert twin.model is cache.model
        assert cache.get_seq_length() == plain.get_seq_length()
        new = prompt(5, seed=9).expand(cache.layers[0].keys.shape[0], -1)
        expected = last_logits(model, new, copy.deepcopy(plain))
        assert torch.equal(last_logits(model, new, twin), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(
        generate(model, ids[:, :20], cache), generate(model, ids[:, :20], DynamicCache())
    )


def test_what_is_written_after_a_crop_is_right(tiny_models):
    model = tiny_models[torch.float32]
    store, ids = ChunkStore(), text(60)
    cache = ChunkReuseCache(model, store)
    reply = generate(model, ids, cache, max_new_tokens=20)
    cache.crop(-5)
    del cache
    again = ChunkReuseCache(model, store)
    expected = generate(model, reply, DynamicCache())
    assert torch.equal(generate(model, reply, again), expected)
    assert again.report().exact_tokens == 60 + 14


def test_a_text_that_leaves_a_chunk_in_its_middle_is_stored_from_there(tiny_models):
    model = tiny_models[torch.float32]
    first = text(10, DOCUMENT, 9)
    store = seen(model, first)
    ids = torch.cat([first[:, :100], prompt(31, seed=77)], 1)
    for exact, stored in ((100, 31), (130, 0), (130, 0)):
        cache = ChunkReuseCache(model, store)
        got = last_logits(model, ids, cache)
        assert torch.allclose(got, last_logits(model, ids, DynamicCache()), atol=1e-4)
        assert (cache.report().exact_tokens, cache.report().stored_tokens) == (exact, stored)
    again = ChunkReuseCache(model, store)
    last_logits(model, first, again)
    assert again.report().exact_tokens == first.shape[1] - 1


def test_documents_stored_ahead_of_any_prompt(tiny_models):
    model = tiny_models[torch.float32]
    store = ChunkStore()
    assert ChunkReuseCache(model, store).warm(DOCUMENT) == 201  # and the bos token
    assert ChunkReuseCache(model, store).warm(DOCUMENT) == 0
    cache, ids = ChunkReuseCache(model, store), text(33, DOCUMENT, 12)
    last_logits(model, ids, cache)
    assert cache.report().moved_tokens == 200
    exact = ChunkReuseCache(model, store)
    bos = torch.ones(1, 1, dtype=torch.long)
    last_logits(model, torch.cat([bos, DOCUMENT, prompt(5, seed=3)], 1), exact)
    assert exact.report().exact_tokens == 201
    with pytest.raises(ValueError, match="one document"):
        cache.warm(DOCUMENT.expand(2, -1))


def test_pinned_documents_stay(tiny_models):
    """A document pinned in a store that has room for little more."""
    model = tiny_models[torch.float32]
    room = seen(model, text(1, DOCUMENT)).stats().bytes
    for pin in (True, False):
        store = ChunkStore(max_bytes=round(1.6 * room))
        ChunkReuseCache(model, store).warm(DOCUMENT, pin=pin)
        for seed in range(12):
            last_logits(model, prompt(100, seed=seed), ChunkReuseCache(model, store))
            assert store.stats().bytes <= store.max_bytes
        cache = ChunkReuseCache(model, store)
        last_logits(model, text(33, DOCUMENT, 12), cache)
        assert cache.report().moved_tokens == (200 if pin else 0)


def test_distinct_prompts_keep_being_admitted_to_a_small_store(tiny_models):
    """Twelve prompts through a store of four: each is found when it comes again at once."""
    model = tiny_models[torch.float32]
    first = prompt(100, seed=0)
    store = ChunkStore(max_bytes=round(4.2 * seen(model, first).stats().bytes))
    for seed in range(12):
        ids = prompt(100, seed=seed)
        for exact in (0, 99):
            cache = ChunkReuseCache(model, store)
            expected = last_logits(model, ids, DynamicCache())
            assert torch.allclose(last_logits(model, ids, cache), expected, atol=1e-4)
            assert cache.report().exact_tokens == exact
            assert store.stats().bytes <= store.max_bytes
    assert store.stats().evicted > 0


@pytest.mark.parametrize("names", [1, 4])
def test_equal_names_of_different_texts_give_no_wrong_token(tiny_models, monkeypatch, names):
    """Chunks share all or a quarter of their names, every candidate place collides."""
    monkeypatch.setattr(
        hashing, "_keyed", lambda salt, purpose, data: bytes([sum(data) % names]) * 32
    )
    collide = lambda ids: np.zeros(max(len(ids) - PROBE_TOKENS + 1, 0), np.uint64)  # noqa: E731
    monkeypatch.setattr("hf_kvcodecs.store.index.probe_hashes", collide)
    monkeypatch.setattr("hf_kvcodecs.store.chunk.probe_hashes", collide)
    model = tiny_models[torch.float32]
    store = ChunkStore(chunker=FixedChunker(tokens=32, window=0))
    for _ in range(2):
        for seed in range(6):
            ids = prompt(90 + seed, seed=seed)
            cache = ChunkReuseCache(model, store, repair="exact")
            assert torch.equal(generate(model, ids, cache), generate(model, ids, DynamicCache()))
    moved = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    ids = text(7, prompt(90, seed=0), 12)
    assert torch.equal(last_logits(model, ids, moved), last_logits(model, ids, DynamicCache()))


@pytest.mark.parametrize("chunker", ["document", FixedChunker(tokens=48), "paragraph"], ids=str)
def test_a_part_of_a_document_is_found_with_any_chunker(tiny_models, chunker):
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9), chunker=chunker)
    cache, ids = ChunkReuseCache(model, store), text(33, DOCUMENT[:, 37:161], 12)
    last_logits(model, ids, cache)
    assert cache.report().moved_tokens == 124


def test_documents_longer_than_the_context_are_stored_in_windows():
    model = tiny_llama(max_position_embeddings=128)
    store = ChunkStore()
    ChunkReuseCache(model, store).warm(DOCUMENT, overlap_tokens=40)
    cache = ChunkReuseCache(model, store)
    ids = text(9, DOCUMENT[:, 100:], 7)
    last_logits(model, ids, cache)
    assert cache.report().moved_tokens == 100
    with pytest.raises(ValueError, match="overlap_tokens: expected 0 to 126"):
        cache.warm(DOCUMENT, overlap_tokens=127)


def test_threads_share_a_model_and_a_store(tiny_models):
    model = tiny_models[torch.float32]
    store = ChunkStore(max_bytes="1MB")
    texts = [text(DOCUMENT, 9 + i) for i in range(4)]
    expected = [generate(model, ids, DynamicCache(), max_new_tokens=8) for ids in texts]
    wrong = []

    def work(worker: int) -> None:
        torch.set_num_threads(1)
        for turn in range(5):
            i = (worker + turn) % len(texts)
            got = generate(model, texts[i], ChunkReuseCache(model, store), max_new_tokens=8)
            if not torch.equal(got, expected[i]):
                wrong.append((worker, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_repr(tiny_models):
    cache = ChunkReuseCache(tiny_models[torch.float32], ChunkStore())
    assert "0 tokens in 3 layers" in repr(cache)
    assert repr(cache.layers[0]) == "ScatterLayer(0 tokens)"
