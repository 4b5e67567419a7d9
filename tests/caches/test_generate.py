"""`generate` writes the same tokens with GAACCache as with DynamicCache, whatever it is asked to
do."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.caches.view import KVView

from ..harness import assert_same_contents, dtype_id, forward, generate, prompt, tiny_llama

SMALL = {"block_tokens": 16}


def both(model, ids, **options):
    """The tokens from a GAACCache and from a DynamicCache."""
    return tuple(
        generate(model, ids, cache, **options) for cache in (GAACCache(**SMALL), DynamicCache())
    )


def padded_batch(lengths=(50, 31, 9)) -> torch.Tensor:
    """Left-padded prompts of different lengths."""
    rows = [torch.nn.functional.pad(prompt(n, seed=n), (max(lengths) - n, 0)) for n in lengths]
    return torch.cat(rows)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "ids", [prompt(5), prompt(33, 3), padded_batch()], ids=["short", "batch", "left-padded"]
)
def test_greedy(dtype, attention, ids):
    model = tiny_llama(dtype)
    model.set_attn_implementation(attention)
    mine, theirs = both(model, ids)
    assert torch.equal(mine, theirs)


HEADS = [(8, 8), (8, 1), (6, 2), (9, 3)]


def grouped_llama(q_heads: int, kv_heads: int, attention: str):
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    model = tiny_llama(torch.float32, hidden_size=16 * q_heads, **heads)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_head_groupings(q_heads, kv_heads, attention):
    model = grouped_llama(q_heads, kv_heads, attention)
    for ids in (prompt(33, 2), padded_batch((33, 20))):
        mine, theirs = both(model, ids)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS, ids=str)
def test_flex_attention(q_heads, kv_heads):
    """Without padding: torch 2.13's C++ template for a padding mask does not compile reliably,
    for DynamicCache either."""
    torch._dynamo.reset()  # or earlier shapes use up its limit, and it goes on uncompiled
    model = grouped_llama(q_heads, kv_heads, "flex_attention")
    mine, theirs = both(model, prompt(33, 2), max_new_tokens=4)
    assert torch.equal(mine, theirs)


def test_a_compiled_model(tiny_models):
    """Dynamo breaks the graph at the cache and goes on: the same logits, whatever the lengths."""
    model = tiny_llama(torch.bfloat16)
    compiled = torch.compile(model, backend="eager")
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own notices
        for size in (20, 20, 20, 1, 1):
            ids = prompt(size, seed=size)
            assert torch.equal(forward(compiled, ids, packed), forward(model, ids, dynamic))


def test_attention_reads_views(monkeypatch, tiny_models):
    """Every call on sealed history reaches sdpa as views: what a fused kernel will intercept."""
    seen = []
    original = KVView.__torch_function__.__func__

    def spy(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            seen.append(args[1].shape[2])
        return original(cls, func, types, args, kwargs)

    monkeypatch.setattr(KVView, "__torch_function__", classmethod(spy))
    generate(tiny_models[torch.bfloat16], prompt(40), GAACCache(**SMALL), max_new_tokens=5)
    assert seen == [length for length in range(41, 45) for _ in range(3)]


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize(
    "ids", [prompt(12, 2), padded_batch((30, 14))], ids=["batch", "left-padded"]
)
def test_beams_cross_block_boundaries(dtype, ids):
    """The reference computes everything anew each step, so that a wrong reorder cannot hide in
    it."""
    model = tiny_llama(dtype)
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 45}
    mine, theirs = both(model, ids, **options)
    assert torch.equal(mine, theirs)
    if dtype == torch.float32:
        plain = model.generate(
            ids, attention_mask=(ids != 0).long(), do_sample=False, use_cache=False, **options
        )
        assert torch.equal(mine, plain)


def test_a_broken_reorder_would_show(monkeypatch):
    from hf_kvcodecs.caches.layer import GAACLayer

    monkeypatch.setattr(GAACLayer, "reorder_cache", lambda self, beam_idx: None)
    mine, theirs = both(tiny_llama(), prompt(12, 2), num_beams=4, max_new_tokens=45)
    assert not torch.equal(mine, theirs)


MODES = {
    "return-sequences": {"do_sample": True, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "prompt-lookup": {"prompt_lookup_num_tokens": 8},
    "chunked-prefill": {"prefill_chunk_size": 13},
    "repetition-penalty": {"repetition_penalty": 1.3},
    "scores": {"output_scores": True},
}


@pytest.mark.compat
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, tiny_models):
    model = tiny_models[torch.float32]
    results = []
    for cache in (GAACCache(**SMALL), DynamicCache()):
        torch.manual_seed(5)
        ids = torch.cat(
            [prompt(30)] * 2, dim=1
        )  # repeats itself, so that prompt lookup finds something
        results.append(generate(model, ids, cache, **MODES[mode]))
    assert torch.equal(*results)


@pytest.mark.compat
def test_assisted_decoding_crops_back(tiny_models):
    model = tiny_models[torch.float32]
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        assistant.lm_head.weight += 0.05 * torch.randn_like(
            assistant.lm_head.weight
        )  # right sometimes only
    plain = generate(model, prompt(30), DynamicCache())
    cache = GAACCache(**SMALL)
    mine = generate(model, prompt(30), cache, assistant_model=assistant)
    assert torch.equal(mine, plain)
    assert cache.get_seq_length() == mine.shape[1] - 1


@pytest.mark.compat
def test_several_turns_on_one_cache(tiny_models):
    model = tiny_models[torch.bfloat16]
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    mine = theirs = prompt(20)
    for turn in range(3):
        mine = generate(model, mine, packed, max_new_tokens=25)
        theirs = generate(model, theirs, dynamic, max_new_tokens=25)
        assert torch.equal(mine, theirs)
        more = prompt(9, seed=turn + 10)
        mine, theirs = torch.cat([mine, more], dim=1), torch.cat([theirs, more], dim=1)
    assert_same_contents(packed, dynamic)


@pytest.mark.compat
def test_the_old_and_the_new_name(tiny_models):
    """`past_key_values=` works on every release; from 5.24 on it warns and `cache=` does not."""
    model, ids = tiny_models[torch.float32], prompt(20)
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = generate(model, ids, DynamicCache(), max_new_tokens=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = model.generate(ids, past_key_values=GAACCache(**SMALL), **options)
    assert torch.equal(old, expected)
    assert any(issubclass(w.category, FutureWarning) for w in caught) == (CACHE_ARGUMENT == "cache")
    new = model.generate(ids, **{CACHE_ARGUMENT: GAACCache(**SMALL)}, **options)
    assert torch.equal(new, expected)


def tiny_gemma(dtype=torch.float32) -> Gemma3ForCausalLM:
    """Sliding window of 24 on two of three layers."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        initializer_range=0.25,
        eos_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=1,
        pad_token_id=0,
    )
    return Gemma3ForCausalLM(config).to(dtype).eval()


@pytest.mark.compat
@pytest.mark.parametrize("with_config", [True, False], ids=["config", "no-config"])
@pytest.mark.parametrize("ids", [prompt(40), padded_batch((40, 17))], ids=["one", "left-padded"])
def test_sliding_window_model(with_config, ids):
    model = tiny_gemma()
    config = model.config if with_config else None
    cache = GAACCache(config, **SMALL)
    mine = generate(model, ids, cache)
    assert torch.equal(mine, generate(model, ids, DynamicCache(config=config)))
    kinds = [type(layer).__name__ for layer in cache.layers]
    if with_config:
        assert kinds == ["DynamicSlidingWindowLayer", "GAACLayer", "DynamicSlidingWindowLayer"]
        assert cache.memory().dense_bytes > cache.memory().total_bytes
    else:
        assert kinds == ["GAACLayer"] * 3


def test_sliding_window_with_beams_and_assisted_decoding():
    model = tiny_gemma()
    ids = prompt(30)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 5}):
        mine = generate(model, ids, GAACCache(model.config, **SMALL), **options)
        assert torch.equal(mine, generate(model, ids, DynamicCache(config=model.config), **options))


@pytest.mark.compat
def test_hybrid_model_needs_its_config():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        initializer_range=0.25,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = Lfm2ForCausalLM(config).eval()
    ids = prompt(30)
    mine = generate(model, ids, GAACCache(config, **SMALL))
    assert torch.equal(mine, generate(model, ids, DynamicCache(config=config)))
    with pytest.raises(ValueError, match=r"GAACCache\(config=model.config\)"):
        generate(model, ids, GAACCache())


def test_encoder_decoder():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=101,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=99,
        initializer_factor=4.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    ids = prompt(20, 2)
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    mine = generate(
        model, ids, EncoderDecoderCache(GAACCache(**SMALL), GAACCache(**SMALL)), **options
    )
    theirs = generate(model, ids, EncoderDecoderCache(DynamicCache(), DynamicCache()), **options)
    assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="EncoderDecoderCache"):
        generate(model, ids, GAACCache(**SMALL), **options)


def test_inference_mode_and_autocast(tiny_models):
    model, ids = tiny_models[torch.float32], prompt(40)
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for step in torch.split(ids, 9, dim=1):
            mine, theirs = (
                model(step, **{CACHE_ARGUMENT: cache}).logits for cache in (packed, dynamic)
            )
            assert torch.equal(mine, theirs)
    assert_same_contents(packed, dynamic)


def test_fp8_generates_and_says_what_it_holds(tiny_models):
    model = tiny_models[torch.bfloat16]
    cache = GAACCache(kv_dtype="fp8_e5m2", **SMALL)
    out = generate(model, prompt(40), cache)
    assert out.shape == (1, 80)
    assert cache.memory().factor > 2.2
    again = generate(model, prompt(40), GAACCache(kv_dtype="fp8_e5m2", block_tokens=32))
    assert torch.equal(out, again), "the tokens must not depend on when blocks are sealed"


def test_output_attentions_with_eager(tiny_models):
    model = tiny_llama()
    model.set_attn_implementation("eager")
    packed, dynamic = GAACCache(**SMALL), DynamicCache()
    forward(model, prompt(40), packed)
    forward(model, prompt(40), dynamic)
    with torch.no_grad():
        mine, theirs = (
            model(prompt(3), output_attentions=True, **{CACHE_ARGUMENT: cache}).attentions
            for cache in (packed, dynamic)
        )
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
