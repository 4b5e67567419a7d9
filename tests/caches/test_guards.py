"""Misuse gets an error that says what to do, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import CacheMisuseError, GAACCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

from ..harness import assert_same_contents, filled_pair, forward, generate, prompt, tiny_llama

SMALL = {"block_tokens": 16}


@pytest.mark.parametrize(("options", "message"), [
    ({"block_tokens": 100}, "block_tokens: expected a multiple of 16"),
    ({"block_tokens": 0}, "block_tokens: expected a multiple of 16"),
    ({"kv_dtype": "int4"}, "kv_dtype: expected None or one of fp8_e4m3, fp8_e5m2"),
    ({"backend": "cuda"}, "backend: expected one of"),
    ({"pack_from": -1}, "pack_from: expected a number of tokens"),
    ({"offload": "disk"}, 'offload: expected None or "cpu"'),
    ({"max_tokens": 100}, "max_tokens: expected config=model.config"),
], ids=str)  # fmt: skip
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        GAACCache(**options)


def test_unknown_options_and_a_model_for_a_config():
    with pytest.raises(TypeError, match="blok_tokens"):
        GAACCache(blok_tokens=128)
    with pytest.raises(TypeError, match=r"config: expected the model's config \(model.config\)"):
        GAACCache(tiny_llama())


def random_states(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype)


@pytest.mark.compat
@pytest.mark.parametrize(("keys", "values", "message"), [
    (random_states(1, 2, 1, 16, dtype=torch.float32), None, "One cache keeps one dtype"),
    (random_states(3, 2, 1, 16), None, "batch size 3, but this cache holds 50 tokens of 1 row"),
    (random_states(1, 4, 1, 16), None, "filled by another model"),
    (random_states(1, 2, 1, 8), None, "filled by another model"),
    (random_states(1, 2, 1, 16), random_states(1, 2, 2, 16), "the same but for head_dim"),
    (random_states(2, 1, 16), None, r"expected \[batch, kv_heads, tokens, head_dim\]"),
    (random_states(1, 2, 1, 16).requires_grad_(), None, "require grad"),
], ids=["dtype", "batch", "heads", "width", "lengths", "axes", "grad"])  # fmt: skip
def test_states_that_cannot_follow(tiny_models, keys, values, message):
    packed, dynamic = filled_pair(tiny_models[torch.bfloat16], prompt(50), **SMALL)
    with pytest.raises(CacheMisuseError, match=message):
        packed.update(keys, keys if values is None else values, 1)
    assert_same_contents(packed, dynamic)


def test_training_mode_is_refused_and_no_grad_is_not():
    model = tiny_llama()
    with pytest.raises(CacheMisuseError, match="no_grad"):
        model(prompt(20), **{CACHE_ARGUMENT: GAACCache()})
    forward(model, prompt(20), GAACCache())


@pytest.mark.compat
@pytest.mark.parametrize("tokens", [1, 30, 55, 59])
def test_a_prompt_no_longer_than_what_is_held(tiny_models, tokens):
    model = tiny_models[torch.bfloat16]
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    for cache in (packed, dynamic):
        generate(model, prompt(20), cache)
    with pytest.raises(CacheMisuseError, match=r"already holds 59.*reset\(\)"):
        generate(model, prompt(tokens, seed=9), packed)
    assert_same_contents(packed, dynamic)
    assert 60 - packed.get_seq_length() == 1, "the refusal left its mark"
    packed.reset()
    mine = generate(model, prompt(tokens, seed=9), packed)
    assert torch.equal(mine, generate(model, prompt(tokens, seed=9), DynamicCache()))


@pytest.mark.compat
def test_another_batch_size(tiny_models):
    model = tiny_models[torch.bfloat16]
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    for cache in (packed, dynamic):
        generate(model, prompt(20), cache)
    with pytest.raises(CacheMisuseError, match=r"reset\(\).*batch_repeat_interleave"):
        generate(model, prompt(80, 2), packed)
    with pytest.raises(CacheMisuseError, match="batch_repeat_interleave"):
        generate(model, prompt(80), packed, num_return_sequences=2, do_sample=True)
    assert_same_contents(packed, dynamic)


@pytest.mark.skipif(
    CACHE_ARGUMENT != "cache", reason="transformers before 5.24 does not tell the cache"
)
def test_use_cache_false_together_with_a_cache(tiny_models):
    packed = GAACCache(**SMALL)
    with pytest.raises(CacheMisuseError, match="use_cache=False"):
        generate(tiny_models[torch.bfloat16], prompt(20), packed, use_cache=False)
    assert packed.get_seq_length() == 0


@pytest.mark.skipif(
    CACHE_ARGUMENT != "cache", reason="transformers before 5.24 does not tell the cache"
)
def test_assisted_decoding_feeding_the_prompt_again(tiny_models):
    model = tiny_models[torch.float32]
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    for cache in (packed, dynamic):
        generate(model, prompt(20), cache)
    longer = torch.cat([generate(model, prompt(20), DynamicCache()), prompt(5)], dim=1)
    with pytest.raises(CacheMisuseError, match="from its beginning again"):
        generate(model, longer, packed, assistant_model=copy.deepcopy(model))
    assert_same_contents(packed, dynamic)


def test_going_on_is_not_mistaken_for_another_prompt(tiny_models):
    """Only the new tokens with a full mask, a left-padded batch, a forward after a generate: all
    legitimate."""
    model = tiny_models[torch.float32]
    for ids in (prompt(20), torch.nn.functional.pad(prompt(20, 2), (6, 0))):
        packed, dynamic = GAACCache(**SMALL), DynamicCache()
        outputs = []
        for cache in (packed, dynamic):
            first = generate(model, ids, cache)
            new = prompt(7, ids.shape[0], seed=4)
            mask = torch.cat(
                [(ids != 0).long(), torch.ones(ids.shape[0], first.shape[1] - ids.shape[1] + 7)],
                dim=1,
            )
            outputs.append(
                generate(model, torch.cat([first, new], dim=1), cache, attention_mask=mask.long())
            )
            forward(model, prompt(1, ids.shape[0]), cache)
        assert torch.equal(*outputs)


def test_a_refused_first_update_adds_no_layers():
    cache = GAACCache()
    with pytest.raises(CacheMisuseError, match="expected"):
        cache.update(torch.randn(1, 2, 3), torch.randn(1, 2, 3), 3)
    assert len(cache.layers) == 0


def test_a_model_without_full_attention_says_that_nothing_is_packed(monkeypatch):
    from transformers import MistralConfig

    from hf_kvcodecs.caches import gaac

    said = []
    monkeypatch.setattr(gaac, "notice_once", said.append)
    GAACCache(MistralConfig(num_hidden_layers=2, sliding_window=8))
    GAACCache(MistralConfig(num_hidden_layers=2, sliding_window=None))
    assert len(said) == 1
    assert "packs nothing for MistralConfig" in said[0]
