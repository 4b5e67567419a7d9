"""Which models text can be moved in, which are refused, and what tells models apart."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from hf_kvcodecs import ChunkReuseCache, ChunkStore
from hf_kvcodecs.caches.chunk_reuse.identity import model_identity
from hf_kvcodecs.caches.chunk_reuse.rotation import find_rotation
from hf_kvcodecs.caches.chunk_reuse.support import check_model
from hf_kvcodecs.kernels.rotate import angles_between, rotate

from ..harness import generate, tiny_llama
from .test_chunk_reuse import DOCUMENT, last_logits, seen, text

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def rope(kind: str, **options: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
SUPPORTED = {
    "llama": (LlamaConfig, {}),
    "llama linear": (LlamaConfig, rope("linear", factor=4.0)),
    "llama yarn": (LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=512)),
    "llama3": (LlamaConfig, rope("llama3", **LLAMA3)),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "gemma": (GemmaConfig, {}),
    "phi3 partial": (Phi3Config, {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "glm interleaved": ("glm", {"partial_rotary_factor": 0.5}),
    "cohere interleaved": ("cohere", {}),
    "smollm3 without rope in a layer": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("olmo2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "granite": ("granite", {}),
}


def tiny(config_class, **changes):
    torch.manual_seed(0)
    settings = SIZES | changes
    if isinstance(config_class, str):
        config = AutoConfig.for_model(config_class, **settings)
    else:
        config = config_class(**settings)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def models():
    """Tiny models by name, made when asked for."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tiny(SUPPORTED[name][0], **SUPPORTED[name][1])
        return made[name]

    return make


@pytest.mark.compat
@pytest.mark.parametrize("name", SUPPORTED)
def test_models_are_right_with_every_row_recomputed_and_close_without(models, name):
    model = models(name)
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(33, DOCUMENT, 12)
    expected = last_logits(model, ids, DynamicCache())
    whole = ChunkReuseCache(model, store, repair="cacheblend", recompute_ratio=1.0)
    got = last_logits(model, ids, whole)
    assert whole.report().moved_tokens == 200
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.compat
@pytest.mark.parametrize("name", SUPPORTED)
def test_keys_of_the_lowest_layer_move_exactly(models, name):
    model = models(name)
    store = seen(model, text(10, DOCUMENT, 9))
    ids = text(500, DOCUMENT, 12)
    cache, plain = ChunkReuseCache(model, store, repair="none"), DynamicCache()
    last_logits(model, ids, cache)
    last_logits(model, ids, plain)
    assert cache.report().moved_tokens == 200
    got, expected = cache.layers[0].keys, plain.layers[0].keys
    assert (got - expected).abs().max() <= 3e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_turns_also_where_a_large_channel_hides_it(dtype):
    """Large keys in a channel pair that hardly turns, as real models have them."""
    slow = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}
    model = tiny(Qwen2Config, **slow)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(0.02)
        model.model.layers[1].self_attn.k_proj.bias[7] = 40.0  # the slowest pair of a head of 16
    assert find_rotation(model.to(dtype)).layers == (True, True, True)
    unturned = tiny("smollm3", no_rope_layers=[1, 0, 1]).to(dtype)
    assert find_rotation(unturned).layers == (True, False, True)


REFUSED = {
    "dynamic rope": (LlamaConfig, rope("dynamic", factor=2.0), "change with the length"),
    "longrope": (
        Phi3Config,
        {"sliding_window": None, "original_max_position_embeddings": 512}
        | rope("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8,
               original_max_position_embeddings=512),
        "switch when the text grows",
    ),
    "sliding window": (MistralConfig, {"sliding_window": 64}, "DynamicSlidingWindowLayer"),
    "learned positions": (GPT2Config, {"n_embd": 64, "n_head": 4, "n_layer": 2}, "no rotary"),
    "alibi": ("bloom", {"n_head": 4, "n_layer": 2}, "takes no position_ids"),
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
               "DynamicSlidingWindowLayer"),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                "DynamicSlidingWindowLayer"),
    "hybrid": ("qwen3_next", {}, "LinearAttentionLayer"),
    "latent attention": (
        "deepseek_v3",
        {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
        r"latent attention \(MLA\)",
    ),
    "linear attention": ("mamba", {"state_size": 4}, "takes no|layers other than full"),
}  # fmt: skip


@pytest.mark.compat
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused_with_a_reason(name):
    config_class, changes, message = REFUSED[name]
    model = tiny(config_class, **changes)
    with pytest.raises(ValueError, match=message):
        ChunkReuseCache(model, ChunkStore())
    assert not model._forward_pre_hooks


def test_encoder_decoder_models_are_refused():
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        ChunkReuseCache(model, ChunkStore())


def test_attention_without_masks_of_ours_is_refused():
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"takes any mask \(sdpa or eager\)"):
        ChunkReuseCache(model, ChunkStore())


def test_attention_that_ignores_who_may_be_seen_is_refused(monkeypatch):
    """Tried out at construction: tokens out of order must give the logits of a plain prefill."""
    from transformers.models.llama import modeling_llama

    real = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def by_row(module, query, key, value, attention_mask, **kwargs):
        return real(module, query, key, value, None, **kwargs)

    model = tiny_llama()
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", by_row)
    with pytest.raises(ValueError, match="computed out of order"):
        check_model(model)


def test_rotation_is_exact_to_float32(models):
    """Against the model's own keys, at far positions."""
    model = models("llama")
    rotation = find_rotation(model)
    states = torch.randn(3, 1, 2, 40, 16)
    old, new = torch.arange(40), torch.arange(40) + 60_000
    there = rotation.move(states, old, new)
    back = rotation.move(there, new, old)
    assert (back - states).abs().max() < 2e-6
    assert torch.equal(rotation.move(states, old, old), states)  # cos 1, sin 0
    double = states.double()
    angle = (60_000 + torch.arange(40).double())[:, None] * rotation.inv_freq.double()
    angle -= torch.arange(40).double()[:, None] * rotation.inv_freq.double()
    x, y = double[..., :8], double[..., 8:]
    expected = torch.cat([x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin()], -1)
    # What remains is what float32 positions times frequencies are off by, in the model too.
    assert (there - expected).abs().max() < 2e-2


@pytest.mark.parametrize(("change", "message"), [
    ({"cos": torch.ones(3, 8)}, "expected cos and sin"),
    ({"start": 4}, "do not fit head_dim"),
    ({"keys": torch.ones(2, 4, 16, dtype=torch.int32)}, "floating-point keys"),
], ids=["tokens", "channels", "dtype"])  # fmt: skip
def test_rotate_checks_its_arguments(change, message):
    cos, sin = angles_between(torch.arange(4), torch.arange(4) + 7, torch.rand(8))
    arguments = {"keys": torch.rand(2, 4, 16), "cos": cos, "sin": sin} | change
    with pytest.raises(ValueError, match=message):
        rotate(**arguments)


# Identity.


@pytest.mark.compat
def test_two_models_never_share():
    store, ids = ChunkStore(), text(10, DOCUMENT, 9)
    first = tiny_llama()
    torch.manual_seed(5)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.model.layers[2].mlp.up_proj.weight.mul_(1.5)
    third = copy.deepcopy(first).to(torch.bfloat16)
    for model in (first, second, third):
        expected = generate(model, ids, DynamicCache())
        for reused in (0, 218):
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, ids, cache), expected)
            assert cache.report().exact_tokens == reused


CHANGES = {
    "in place": lambda m: m.model.layers[1].mlp.up_proj.weight.add_(0.01),
    "behind autograd": lambda m: m.model.layers[1].mlp.up_proj.weight.data.add_(0.01),
    "another tensor": lambda m: setattr(
        m.model.norm, "weight", torch.nn.Parameter(m.model.norm.weight * 2)
    ),
    "frequencies": lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
    "config": lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
    "attention": lambda m: m.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_another_model(change):
    model = tiny_llama()
    before = model_identity(model)
    assert model_identity(model) == before
    assert model_identity(copy.deepcopy(model)) == before
    with torch.no_grad():
        CHANGES[change](model)
    assert model_identity(model) != before


def test_weights_changed_after_construction_change_the_key():
    model, store, ids = tiny_llama(), ChunkStore(), text(10, DOCUMENT, 9)
    late = ChunkReuseCache(model, store)
    generate(model, ids, ChunkReuseCache(model, store))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.1)
    expected = generate(model, ids, DynamicCache())
    assert torch.equal(generate(model, ids, late), expected)
    assert late.report().exact_tokens == 0


def test_a_reply_of_changed_weights_is_not_stored():
    model, store, ids = tiny_llama(), ChunkStore(), text(40)
    cache = ChunkReuseCache(model, store)
    generate(model, ids, cache)
    stored = store.stats().stored
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.1)
    cache.flush()
    del cache
    assert store.stats().stored == stored


def test_autocast_does_not_share():
    model, store, ids = tiny_llama(), ChunkStore(), text(10, DOCUMENT, 9)
    generate(model, ids, ChunkReuseCache(model, store))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for reused in (0, 218):
            cache = ChunkReuseCache(model, store)
            generate(model, ids, cache)
            assert cache.report().exact_tokens == reused
            del cache


# peft asks transformers 5.24 for an attribute under its old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_do_not_share():
    """Two adapters and none, switched between prompts, on one model and one store."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(), config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    store, ids = ChunkStore(), text(10, DOCUMENT, 9)
    for turn in range(2):
        for name in ("one", "two", None):
            if name:
                model.set_adapter(name)
            with model.disable_adapter() if not name else torch.no_grad():
                expected = generate(model, ids, DynamicCache())
                cache = ChunkReuseCache(model, store)
                assert torch.equal(generate(model, ids, cache), expected)
                assert cache.report().exact_tokens == (218 if turn else 0)
