"""What must never get into the store: states that another call, model or mode would not compute."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import ChunkReuseCache, ChunkStore
from hf_kvcodecs.caches.chunk_reuse import cache as chunk_reuse_cache
from hf_kvcodecs.caches.chunk_reuse import hooks
from hf_kvcodecs.caches.chunk_reuse.identity import model_identity
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

from ..harness import forward, generate, prompt, tiny_llama
from .test_chunk_reuse import DOCUMENT, last_logits, seen, text


def exact_tokens(model, ids: torch.Tensor, store: ChunkStore) -> int:
    """What is served of ``ids``, whose logits must be those of a plain prefill."""
    cache = ChunkReuseCache(model, store, repair="exact")
    got, expected = (last_logits(model, ids, c) for c in (cache, DynamicCache()))
    assert torch.allclose(got, expected, atol=1e-4)
    return cache.report().exact_tokens


def padded(*rows: torch.Tensor) -> torch.Tensor:
    width = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])


FOLLOWS = {
    "nothing said": {},
    "mask": {"attention_mask": torch.ones(1, 140, dtype=torch.long)},
    "positions": {"position_ids": torch.arange(40, 140)[None]},
}
DOES_NOT_FOLLOW = {
    "hidden beginning": {"attention_mask": torch.ones(1, 140).index_fill(1, torch.arange(30), 0)},
    "hole": {"attention_mask": torch.ones(1, 140).index_fill(1, torch.tensor([25]), 0)},
    "hidden end": {"attention_mask": torch.ones(1, 140).index_fill(1, torch.tensor([139]), 0)},
    "4-D mask": {"attention_mask": torch.ones(1, 1, 100, 140, dtype=torch.bool)},
    "jumping positions": {"position_ids": torch.arange(100)[None] + 500},
    "standing positions": {"position_ids": torch.full((1, 100), 40)},
    "images": {"pixel_values": torch.ones(1, 3, 8, 8)},
    "embeddings": {},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", [*FOLLOWS, *DOES_NOT_FOLLOW])
def test_a_later_call_is_stored_only_if_it_follows(tiny_models, name):
    model, store = tiny_models[torch.float32], ChunkStore()
    cache, plain, ids, new = ChunkReuseCache(model, store), DynamicCache(), text(40), prompt(100)
    options = (FOLLOWS | DOES_NOT_FOLLOW)[name]
    last_logits(model, ids, cache)
    forward(model, ids, plain)
    if name == "embeddings":
        with torch.no_grad():
            embeds = 1.1 * model.get_input_embeddings()(new)
            for c in (cache, plain):
                forward(model, None, c, inputs_embeds=embeds)
    else:
        got, expected = (last_logits(model, new, c, **options) for c in (cache, plain))
        assert torch.equal(got, expected)
    del cache
    expected = 140 if name in FOLLOWS else 40
    assert exact_tokens(model, torch.cat([ids, new, prompt(3)], 1), store) == expected


@pytest.mark.parametrize("masked", [True, False], ids=["padding hidden", "padding seen"])
def test_later_calls_of_padded_rows(tiny_models, masked):
    """Padding must stay hidden; with it, two turns of two rows are stored."""
    model, store = tiny_models[torch.float32], ChunkStore()
    rows = [text(40), text(70)]
    batch, new = padded(*rows), prompt(80, batch=2, seed=9)
    mask = (batch != 0).long()
    cache = ChunkReuseCache(model, store)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    last_logits(model, batch, cache, attention_mask=mask, position_ids=places)
    options = {"position_ids": places[:, -1:] + torch.arange(1, 81)}
    if masked:
        options["attention_mask"] = torch.cat([mask, torch.ones_like(new)], 1)
    last_logits(model, new, cache, **options)
    del cache
    for row, (first, ids) in enumerate(zip(rows, new.split(1), strict=True)):
        found = exact_tokens(model, torch.cat([first, ids, prompt(3, seed=row)], 1), store)
        assert found == first.shape[1] + (80 if masked else 0)


def test_layers_changed_by_others_are_not_stored(tiny_models):
    model, store = tiny_models[torch.float32], ChunkStore()
    cache, ids, new = ChunkReuseCache(model, store), text(40), prompt(100)
    last_logits(model, ids, cache)
    for layer in cache.layers:
        layer.crop(-10)
    last_logits(model, new, cache)
    del cache
    assert exact_tokens(model, torch.cat([ids[:, :30], new, prompt(3)], 1), store) <= 30


MEANWHILE = {
    "weights behind autograd": (
        lambda m: m.model.layers[0].self_attn.k_proj.weight.data.mul_(2),
        lambda m: m.model.layers[0].self_attn.k_proj.weight.data.div_(2),
    ),
    "weights": (
        lambda m: m.model.layers[0].self_attn.k_proj.weight.mul_(2),
        lambda m: m.model.layers[0].self_attn.k_proj.weight.div_(2),
    ),
    "config": (
        lambda m: setattr(m.config, "rms_norm_eps", 1e-2),
        lambda m: setattr(m.config, "rms_norm_eps", 1e-6),
    ),
    "training": (lambda m: m.train(), lambda m: m.eval()),
}


@pytest.mark.parametrize("new_tokens", [100, 1], ids=["turn", "single tokens"])
@pytest.mark.parametrize("name", MEANWHILE)
def test_a_model_changed_and_changed_back(name, new_tokens):
    if (name, new_tokens) == ("weights behind autograd", 1):
        pytest.skip("a documented limit: such a change leaves no trace from token to token")
    model, store = tiny_llama(attention_dropout=0.9), ChunkStore()
    cache, ids, new = ChunkReuseCache(model, store), text(40), prompt(100)
    change, back = MEANWHILE[name]
    last_logits(model, ids, cache)
    with torch.no_grad():
        change(model)
        for part in new.split(new_tokens, 1):
            last_logits(model, part, cache)
        back(model)
    cache.flush()
    del cache
    assert exact_tokens(model, torch.cat([ids, new, prompt(3)], 1), store) == 40


@pytest.mark.parametrize("factor", [None, 0.5], ids=["dtype", "frequencies"])
def test_keys_turn_as_the_model_s_do_now(factor):
    """A model that moved to bf16, frequencies too, or got others, after caches were made on it."""
    model = tiny_llama()
    ChunkReuseCache(model, ChunkStore())
    if factor:
        model.model.rotary_emb.inv_freq.mul_(factor)
    else:
        model.to(torch.bfloat16)
    cache = ChunkReuseCache(model, seen(model, text(10, DOCUMENT, 9)), repair="none")
    plain, ids = DynamicCache(), text(1500, DOCUMENT, 12)
    for c in (cache, plain):
        last_logits(model, ids, c)
    assert cache.report().moved_tokens == 200
    got, expected = cache.layers[0].keys.float(), plain.layers[0].keys.float()
    rounding = 1e-5 if factor else 2**-6
    assert ((got - expected).abs() <= rounding * (1 + expected.abs().amax(-1, keepdim=True))).all()


def test_training_mode_runs_without_the_store(monkeypatch):
    said = []
    monkeypatch.setattr("hf_kvcodecs.caches.chunk_reuse.cache.notice_once", said.append)
    model = tiny_llama(attention_dropout=0.5)
    model.model.layers[1].train()
    ChunkReuseCache(model, ChunkStore())
    assert [m.training for m in model.model.layers] == [False, True, False]
    assert seen(model, text(100)).stats().stored == 0
    assert "model.eval()" in said[0]
    before = model_identity(model)
    model.eval()
    assert model_identity(model) != before
    assert exact_tokens(model, text(100), seen(model, text(100))) == 99


def test_hooks_that_steer_the_model_run_without_the_store(tiny_models, monkeypatch):
    said = []
    monkeypatch.setattr("hf_kvcodecs.caches.chunk_reuse.cache.notice_once", said.append)
    model = tiny_models[torch.float32]
    store = seen(model, text(10, DOCUMENT, 9))
    handle = model.model.layers[0].register_forward_hook(lambda *args: args[-1] * 1.5)
    try:
        cache = ChunkReuseCache(model, store)
        got, expected = (generate(model, text(10, DOCUMENT), c) for c in (cache, DynamicCache()))
    finally:
        handle.remove()
    assert torch.equal(got, expected)
    assert cache.report().exact_tokens == 0
    assert "LlamaDecoderLayer" in said[0]


@pytest.mark.compat
# peft asks transformers 5.24 for an attribute under its old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_chosen_for_each_row_run_without_the_store(monkeypatch):
    peft = pytest.importorskip("peft", reason="adapters need peft")
    said = []
    monkeypatch.setattr("hf_kvcodecs.caches.chunk_reuse.cache.notice_once", said.append)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(), config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    store, ids = ChunkStore(), text(10, DOCUMENT)
    batch = ids.expand(2, -1)
    for _ in range(2):
        got, expected = (
            generate_peft(model, batch, c, adapter_names=["one", "two"])
            for c in (ChunkReuseCache(model, store), DynamicCache())
        )
        assert torch.equal(got, expected)
    assert store.stats().stored == 0
    assert "hooks on its Linear" in said[0]
    for exact in (0, 209):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(
            generate_peft(model, ids, cache), generate_peft(model, ids, DynamicCache())
        )
        assert cache.report().exact_tokens == exact
    # And from the second turn of a cache on.
    reply = generate_peft(model, ids, cache)
    stored = store.stats().stored
    generate_peft(model, torch.cat([reply, prompt(90)], 1), cache, adapter_names=["two"])
    del cache
    assert store.stats().stored == stored


def generate_peft(model, ids, cache, **options):
    return generate(model, ids, cache, max_new_tokens=9, **options)


def test_cacheblend_on_a_model_of_one_layer():
    """There is no deviation to probe: values of layer 0 depend on the token alone."""
    model = tiny_llama(num_hidden_layers=1)
    store, ids = seen(model, text(10, DOCUMENT, 9)), text(33, DOCUMENT, 12)
    cache = ChunkReuseCache(model, store, repair="cacheblend")
    got, expected = (last_logits(model, ids, c) for c in (cache, DynamicCache()))
    assert torch.allclose(got, expected, atol=1e-4)
    assert cache.report().moved_tokens == 200


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_weights_anywhere_in_a_storage(offset):
    model = tiny_llama(torch.bfloat16)
    before, weight = model_identity(model), model.model.norm.weight
    large = torch.zeros(len(weight) + offset, dtype=weight.dtype)
    large[offset:] = weight.data
    model.model.norm.weight = torch.nn.Parameter(large[offset:])
    assert model_identity(model) == before


def test_a_config_that_asks_for_hidden_states(tiny_models):
    model = tiny_llama()
    ids, store = text(10, DOCUMENT, 12), seen(model, text(10, DOCUMENT, 9))
    model.config.output_hidden_states = True
    cache = ChunkReuseCache(model, store)
    with torch.no_grad():
        states = model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).hidden_states
    assert states[0].shape[1] == ids.shape[1]


def test_a_cache_may_die_while_its_thread_holds_the_lock():
    model = tiny_llama()
    caches = [ChunkReuseCache(model, ChunkStore())]

    def work():
        with hooks._lock:
            caches.clear()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    ChunkReuseCache(model, ChunkStore())  # whoever comes next takes leave of it
    assert not model._forward_pre_hooks


def test_a_cache_collected_inside_an_operation_of_its_store_writes_behind_it(tiny_models):
    model, store = tiny_models[torch.float32], ChunkStore()
    reply = generate(model, text(40), cache := ChunkReuseCache(model, store))
    cache.itself = cache  # lives until the garbage collector comes by
    del cache
    stored = store.stats().stored
    with store.lock:
        gc.collect()
        assert store.stats().stored == stored
    assert store.stats().stored > stored
    assert exact_tokens(model, torch.cat([reply, prompt(3)], 1), store) == 79


def test_a_miss_takes_time_too(tiny_models):
    cache = ChunkReuseCache(tiny_models[torch.float32], ChunkStore())
    last_logits(tiny_models[torch.float32], text(100), cache)
    report = cache.report()
    assert 0 < report.lookup_seconds < report.prefill_seconds


def test_layers_on_several_devices_are_refused():
    model = tiny_llama()
    model.model.layers[2].to("meta")

    def carry(_, args, kwargs):
        moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        moved["position_embeddings"] = tuple(t.to("meta") for t in kwargs["position_embeddings"])
        return tuple(a.to("meta") for a in args), moved

    model.model.layers[2].register_forward_pre_hook(carry, with_kwargs=True)
    for part in (model.model.norm, model.lm_head):
        part.to("meta")
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\)"):
        ChunkReuseCache(model, ChunkStore())


@pytest.mark.parametrize("other", [{"num_hidden_layers": 2}, {"num_key_value_heads": 1}])
def test_chunks_of_another_shape_are_misses(tmp_path, monkeypatch, other):
    """Files with the right text, name and checksum, written by a model of another shape."""
    model, stranger = tiny_llama(), tiny_llama(**other)
    ids = text(60)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_reuse_cache, "model_identity", lambda *_: model_identity(model))
        last_logits(stranger, ids, ChunkReuseCache(stranger, ChunkStore(disk=tmp_path)))
    store = ChunkStore(disk=tmp_path)
    assert exact_tokens(model, ids, store) == 0
    assert store.stats().damaged
    assert exact_tokens(model, ids, store) > 0  # written anew
