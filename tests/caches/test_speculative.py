"""Without draft_verify, SpeculativeKVCache is an exact offloaded cache, in all that transformers
asks of one."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import CacheMisuseError, Compressor, SpeculativeKVCache, draft_verify
from hf_kvcodecs.caches import speculative
from hf_kvcodecs.compressors import QUANTISERS, SCORERS, compressor_for
from hf_kvcodecs.store.full import DiskStore, HostStore
from hf_kvcodecs.store.packed import PackedStore
from hf_kvcodecs.store.streaming import StagedStream

from ..harness import assert_same_bits, dtype_id, forward, generate, prompt, tiny_llama
from .test_generate import padded_batch, tiny_gemma

pytestmark = pytest.mark.compat


def assert_same(cache, reference):
    for idx, layer in enumerate(reference.layers):
        keys, values = cache.dense(idx)
        assert_same_bits(keys, layer.keys)
        assert_same_bits(values, layer.values)


def assert_close(cache, reference):
    """The same up to rounding: several tokens at once round differently from single ones."""
    for idx, layer in enumerate(reference.layers):
        keys, values = cache.dense(idx)
        torch.testing.assert_close(keys, layer.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(values, layer.values, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize(
    "full", [{}, {"full": "disk"}, {"full_codec": "gaac"}], ids=["cpu", "disk", "packed"]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_and_contents(tiny_models, dtype, full, attention):
    model = copy.deepcopy(tiny_models[dtype])
    model.set_attn_implementation(attention)
    ids = padded_batch()
    cache, dynamic = SpeculativeKVCache(**full), DynamicCache()
    assert torch.equal(generate(model, ids, cache), generate(model, ids, dynamic))
    assert_same(cache, dynamic)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_other_ways_to_decode(tiny_models, options):
    model, ids = tiny_models[torch.float32], prompt(20).repeat(1, 2)
    ours = generate(model, ids, SpeculativeKVCache(), **options)
    assert torch.equal(ours, generate(model, ids, DynamicCache(), **options))


def test_sampling_is_the_same(tiny_models):
    model, ids = tiny_models[torch.float32], prompt(20)
    out = []
    for cache in (SpeculativeKVCache(), DynamicCache()):
        torch.manual_seed(4)
        out.append(generate(model, ids, cache, do_sample=True))
    assert torch.equal(*out)


def test_sliding_layers_stay_transformers_own():
    model, ids = tiny_gemma(), prompt(40)
    cache = SpeculativeKVCache(model.config)
    ours = generate(model, ids, cache)
    assert torch.equal(ours, generate(model, ids, DynamicCache(config=model.config)))
    assert [type(layer).__name__ for layer in cache.layers] == [
        "DynamicSlidingWindowLayer",
        "SpeculativeLayer",
        "DynamicSlidingWindowLayer",
    ]


def test_crop_select_repeat_reorder_reset(tiny_models):
    model, ids = tiny_models[torch.float32], prompt(30, batch=3)
    cache, dynamic = SpeculativeKVCache(), DynamicCache()
    forward(model, ids, cache)
    forward(model, ids, dynamic)
    for change in (
        lambda c: c.crop(-7),
        lambda c: c.crop(0),
        lambda c: c.batch_select_indices(torch.tensor([2, 0])),
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.reorder_cache(torch.tensor([3, 0, 0, 1])),
        lambda c: c.crop(-1),
    ):
        change(cache)
        change(dynamic)
        assert_same(cache, dynamic)
        assert cache.get_seq_length() == dynamic.get_seq_length()
    with pytest.raises(ValueError, match="expected 0 or a negative number"):
        cache.crop(3)
    cache.reset()
    assert cache.get_seq_length() == 0
    forward(model, ids[:1], cache)
    fresh = DynamicCache()
    forward(model, ids[:1], fresh)
    assert_same(cache, fresh)


@pytest.mark.parametrize("full", ["cpu", "disk"])
def test_a_copy_goes_its_own_way(tiny_models, full):
    model, ids = tiny_models[torch.float32], prompt(30)
    cache = SpeculativeKVCache(full=full, compressor="snapkv", keep=0.5)
    generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=5)
    copied = copy.deepcopy(cache)
    assert copied.faces.store is not cache.faces.store
    forward(model, prompt(6, seed=9), copied)
    dynamic = DynamicCache()
    generate(model, ids, dynamic, max_new_tokens=5)
    assert_close(cache, dynamic)
    assert copied.get_seq_length() == cache.get_seq_length() + 6


def test_files_leave_nothing_behind(tmp_path):
    store = DiskStore(tmp_path)
    store.append(0, torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
    assert not list(tmp_path.iterdir())
    assert store.read(0)[0].sum() == 80
    with pytest.raises(FileNotFoundError):
        DiskStore(tmp_path / "nowhere").append(0, torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))


def test_memory_behind_packed_tokens_is_made_once():
    """Pinning it anew would hold up a round; what is read is what was appended all the same."""
    store, generator = PackedStore(), torch.Generator().manual_seed(0)
    states = torch.randn(2, 1, 2, 4000, 64, generator=generator).bfloat16()
    places = set()
    for keys, values in zip(*(part.split(75, 2) for part in states), strict=True):
        store.append(0, keys, values)
        places.add(store.like(0)[0].data_ptr())
    assert len(places) == 1
    assert_same_bits(torch.stack(store.read(0)), states)
    store.select_rows(0, torch.tensor([0, 0]))  # another batch takes other memory
    assert_same_bits(store.read(0)[1], states[1].expand(2, -1, -1, -1))


def test_plain_decoding_is_noticed(tiny_models, monkeypatch):
    model, said = tiny_models[torch.float32], []
    monkeypatch.setattr(speculative, "notice_once", said.append)
    generate(model, prompt(9), SpeculativeKVCache(), custom_generate=draft_verify)
    forward(model, prompt(9), SpeculativeKVCache())
    assert not said
    generate(model, prompt(9), SpeculativeKVCache(), max_new_tokens=4)
    assert "decodes without drafts" in said[0]
    assert len(set(said)) == 1


def test_drafts_leave_the_exact_face_alone(tiny_models):
    model, ids = tiny_models[torch.float32], prompt(40)
    cache, dynamic = SpeculativeKVCache(compressor="snapkv", keep=0.3), DynamicCache()
    forward(model, ids, cache)
    forward(model, ids, dynamic)
    cache.begin_draft()
    wrong = forward(model, prompt(3, seed=5), cache)
    assert cache.get_seq_length() == 43
    cache.end_draft()
    assert cache.get_seq_length() == 40
    assert_same(cache, dynamic)
    right = forward(model, prompt(3, seed=5), dynamic)
    torch.testing.assert_close(forward(model, prompt(3, seed=5), cache), right)
    assert (wrong - right).abs().max() > 0.01


def test_a_round_by_hand(tiny_models):
    model, ids = tiny_models[torch.float32], prompt(40)
    cache, dynamic = SpeculativeKVCache(compressor="kivi", bits=8), DynamicCache()
    new = prompt(6, seed=3)
    forward(model, ids, cache)
    cache.begin_draft()
    forward(model, new, cache)
    cache.begin_verify()
    forward(model, new, cache)
    cache.commit(4, 6)
    forward(model, torch.cat([ids, new[:, :4]], dim=1), dynamic)
    assert_close(cache, dynamic)
    assert all(layer.draft.tail_tokens == 4 for layer in cache.own_layers)


@pytest.mark.parametrize("name", [*SCORERS, *QUANTISERS, "snapkv+kivi", "kvzip+rotate"])
def test_compressors_by_name(name):
    compressor = compressor_for(name)
    assert compressor.name == name
    assert SpeculativeKVCache(compressor=compressor).compressor is compressor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "zip"}, "expected one of streaming_llm"),
        ({"compressor": "kivi", "keep": 0.5}, "drops no tokens"),
        ({"compressor": "snapkv", "keep": 1.5}, r"expected a part in \(0, 1\]"),
        ({"compressor": "kivi", "bits": 5}, "bits: expected one of"),
        ({"compressor": Compressor(), "bits": 4}, "give them with a name only"),
        ({"draft_length": 0}, "draft_length: expected 'auto' or a number"),
        ({"full_codec": "zip"}, "full_codec: expected None, or 'gaac'"),
        ({"full_codec": "gaac", "full": "disk"}, "full_codec: expected None, or 'gaac'"),
        ({"full": "moon"}, "full: expected one of cpu, disk"),
        ({"staging_bytes": -1}, "staging_bytes: expected None"),
        ({"refresh_tokens": 0}, "refresh_tokens: expected at least 1"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeKVCache(**options)


@pytest.mark.parametrize("staged", [False, True])
def test_a_long_text_packed(tiny_models, staged):
    """Sealed blocks, a raw tail, crops into both, rows, and drafts over all of it."""
    model, ids = tiny_models[torch.bfloat16], prompt(900)
    cache, dynamic = SpeculativeKVCache(full_codec="gaac", compressor="snapkv"), DynamicCache()
    if staged:
        device = torch.device("cpu")
        cache.faces.streams[device] = StagedStream(cache.faces.store, device)
    for part in (ids, prompt(300, seed=2), prompt(500, seed=3), prompt(400, seed=4)):
        forward(model, part, cache)
        forward(model, part, dynamic)
    assert_same(cache, dynamic)
    _, full, dense = cache.face_bytes()
    assert full < 0.85 * dense  # a random model's numbers; the newest 128 tokens are raw
    copied = copy.deepcopy(cache)
    for crop in (-5, -140, -1300, -200):
        cache.crop(crop)
        dynamic.crop(crop)
        assert_same(cache, dynamic)
    assert copied.get_seq_length() == 2100
    copied.begin_draft()
    forward(model, prompt(3), copied)
    copied.begin_verify()
    forward(model, prompt(3), copied)
    copied.commit(2, 3)
    assert copied.get_seq_length() == 2102


@pytest.mark.parametrize("staging_bytes", [None, 1 << 30])
def test_each_layer_crosses_the_link_once_a_read(staging_bytes):
    """Also where slots have become too small, which costs new ones and no second transfer."""
    store = HostStore()
    stream = StagedStream(store, torch.device("cpu"), staging_bytes)
    states = torch.ones(1, 2, 26, 16)
    for _ in range(40):
        before = stream.bytes_read
        wanted = sum(store.layer_nbytes(layer) for layer in range(3))
        stream.prefetch()
        for layer in range(3):
            keys, _ = stream.extend(layer, states, states)
            assert keys.shape[2] == store.tokens(layer)
        assert stream.bytes_read - before == wanted


def test_misuse(tiny_models):
    model = tiny_models[torch.float32]
    cache = SpeculativeKVCache()
    with pytest.raises(CacheMisuseError, match="holds no tokens"):
        cache.begin_draft()
    with pytest.raises(ValueError, match="no report yet"):
        cache.report()
    forward(model, prompt(20, batch=2), cache)
    with pytest.raises(CacheMisuseError, match="this cache has 2 rows"):
        cache.begin_draft()
    with pytest.raises(CacheMisuseError, match="Continue the same text"):
        forward(model, prompt(3), cache)
    assert cache.get_seq_length() == 20
    with pytest.raises(CacheMisuseError, match="require grad"):
        model(prompt(3, batch=2), use_cache=True, **{argument(): SpeculativeKVCache()})


def argument():
    from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

    return CACHE_ARGUMENT


def test_eager_attention_cannot_draft(tiny_models):
    model = tiny_llama()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="set_attn_implementation"):
        generate(model, prompt(20), SpeculativeKVCache(), custom_generate=draft_verify)
    cache = SpeculativeKVCache(compressor="knorm")
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        generate(model, prompt(20), cache, custom_generate=draft_verify)
    assert cache.faces.face == "full"
