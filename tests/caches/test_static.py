"""A fixed capacity: steps that are compiled and captured, on a GPU or with the kernels
interpreted."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from transformers import CompileConfig, DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches import fused
from hf_kvcodecs.caches.static_layer import StaticView, visible_span
from hf_kvcodecs.caches.static_pair import StaticPair
from hf_kvcodecs.errors import CacheMisuseError
from hf_kvcodecs.kernels.packed_append import StaticBlocks, packed_append
from hf_kvcodecs.kernels.static_ops import static_append, static_attention

from ..harness import assert_same_bits, assert_same_contents, forward, generate, tiny_llama
from ..kernels.register_cases import adversarial, ordinary

pytest.importorskip("triton", reason="needs Triton")
slow_on_cpu = pytest.mark.slow if not torch.cuda.is_available() else pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 runs these on a CPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fused_on_cpu(monkeypatch):
    monkeypatch.setattr(fused, "fused_device", lambda device: True)


def states(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = ordinary(*shape, seed)
    return keys.to(DEVICE), values.to(DEVICE)


def model():
    return tiny_llama(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        num_hidden_layers=2,
    ).to(DEVICE, torch.bfloat16)  # fmt: skip


def prompt(rows: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + tokens)
    return torch.randint(1, 100, (rows, tokens), generator=generator).to(DEVICE)


def check(pair: StaticPair, keys: torch.Tensor, values: torch.Tensor) -> None:
    found = pair.dense()
    assert pair.tokens == keys.shape[2]
    assert_same_bits(found[0], keys)
    assert_same_bits(found[1], values)


def append(pair: StaticPair, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return static_append(keys, values, pair.memory.memory, pair.memory.sizes, pair.max_tokens)


def attention(pair: StaticPair, q: torch.Tensor, *rest: object, scale: float = 1.0) -> torch.Tensor:
    return static_attention(q, *rest, pair.memory.memory, pair.memory.sizes, scale)


def test_appending_and_sealing():
    keys, values = states(2, 1, 600, 64)
    pair, held = StaticPair(keys[:, :, :300], values[:, :, :300], 600), 300
    address = pair.memory.memory.data_ptr()
    for count in (1, 20, 64, 1, 63):
        new = slice(held, held + count)
        after = append(pair, keys[:, :, new], values[:, :, new])
        held += count
        check(pair, keys[:, :, :held], values[:, :, :held])
        assert after.tolist() == [[held] * 2, [pair.sealed_blocks] * 2]
        assert 0 <= held - pair.sealed_tokens < 192
    pair.append(keys[:, :, held:], values[:, :, held:])  # a long one, by the host
    check(pair, keys, values)
    assert pair.sealed_blocks == 4
    assert address == pair.memory.memory.data_ptr()


def test_what_does_not_fit_is_nan_and_an_error():
    keys, values = states(1, 1, 64, 64)
    pair = StaticPair(keys[:, :, :60], values[:, :, :60], 64)
    after = append(pair, keys[:, :, :4], values[:, :, :4])
    q = keys[:, :, :1]
    assert attention(pair, q, after, None).isfinite().all()
    pair.check()
    with pytest.raises(CacheMisuseError, match="64 of at most 64"):
        pair.check(1)
    after = append(pair, keys[:, :, :1], values[:, :, :1])
    assert attention(pair, q, after, None).isnan().all()
    with pytest.raises(CacheMisuseError, match="lost"):
        pair.dense()


@slow_on_cpu  # a minute in the interpreter
def test_more_raw_blocks_than_reserved():
    raw = adversarial(64)["every pattern"][0].to(DEVICE)
    keys, values = states(1, 1, 192, 64)
    pair = StaticPair(keys, values, 1000)
    reserved = pair.memory.sizes[5]
    for _ in range(reserved + 1):
        append(pair, raw[:, :, :64], raw[:, :, :64])
        append(pair, raw[:, :, 64:], raw[:, :, 64:])
    with pytest.raises(CacheMisuseError, match="pack far worse"):
        pair.check()
    many = raw.repeat(1, 1, 4, 1)  # a prompt of such blocks has room for more of them
    pair = StaticPair(many, many, 1400)
    for _ in range(reserved + 3):
        append(pair, raw[:, :, :64], raw[:, :, :64])
        append(pair, raw[:, :, 64:], raw[:, :, 64:])
    check(pair, *[raw.repeat(1, 1, 4 + reserved + 3, 1)] * 2)
    pair = StaticPair(keys, values, 1000)  # and a second prompt that packs worse makes it
    pair.append(many, many)
    check(pair, torch.cat([keys, many], 2), torch.cat([values, many], 2))


@pytest.mark.parametrize("cut", [400, 257, 200])
def test_crop(cut):
    keys, values = states(1, 1, 400, 64)
    keys[:, :, 128:256] = adversarial(64)["every pattern"][0].to(DEVICE)  # a raw block
    pair = StaticPair(keys, values, 1000)
    address = pair.memory.memory.data_ptr()
    assert pair.crop(cut) is pair
    check(pair, keys[:, :, :cut], values[:, :, :cut])
    append(pair, keys[:, :, :50], values[:, :, :50])
    expected = [torch.cat([x[:, :, :cut], x[:, :, :50]], 2) for x in (keys, values)]
    check(pair, *expected)
    assert address == pair.memory.memory.data_ptr()


@slow_on_cpu  # a minute in the interpreter
def test_rows_of_the_batch_and_copies():
    keys, values = states(3, 1, 400, 64)
    keys[1, :, :128] = adversarial(64)["every pattern"][0].to(DEVICE)
    pair = StaticPair(keys, values, 1000)
    twin = copy.deepcopy(pair)
    index = torch.tensor([2, 1, 1])
    assert pair.select_batch(index) is pair
    for _ in range(4):  # each row seals into its own slots
        append(pair, keys[:, :, :50], values[:, :, :50])
    again = [torch.cat([x[index.to(DEVICE)], *[x[:, :, :50]] * 4], 2) for x in (keys, values)]
    check(pair, *again)
    check(twin, keys, values)
    other = twin.select_batch(torch.tensor([0, 0, 1, 1, 2, 2]))
    check(other, keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0))


@pytest.mark.parametrize(("tokens", "new"), [(300, 9), (50, 3), (319, 1)])
def test_attention_is_that_of_dense_tensors(tokens, new):
    keys, values = states(2, 1, tokens + new, 64)
    pair = StaticPair(keys[:, :, :tokens], values[:, :, :tokens], 1000)
    after = append(pair, keys[:, :, tokens:], values[:, :, tokens:])
    q = torch.randn(2, 4, new, 64, generator=torch.Generator().manual_seed(3)).to(keys)
    starts = torch.tensor([0, 31], device=DEVICE, dtype=torch.int32)
    out = attention(pair, q, after, torch.stack([starts, after[0]]), scale=0.125)
    wrong = torch.stack([starts, after[0] - torch.arange(2, device=DEVICE)]).int()
    assert attention(pair, q, after, wrong)[1].isnan().all()
    assert attention(pair, q, after, wrong)[0].isfinite().all()
    with pytest.raises(CacheMisuseError, match="a mask that is not causal"):
        pair.check()
    pair.memory.errors.zero_()
    wrong = torch.stack([-starts, after[0]])
    assert attention(pair, q, after, wrong)[1].isnan().all()
    with pytest.raises(CacheMisuseError, match="a mask that is not causal"):
        pair.dense()
    token = torch.arange(tokens + new, device=DEVICE)
    mask = (token <= token[tokens:, None]) & (token >= starts[:, None, None])
    dense = (x.float().repeat_interleave(4, 1) for x in (keys, values))
    expected = F.scaled_dot_product_attention(q.float(), *dense, mask[:, None], scale=0.125)
    error = float((out.float() - expected).norm() / expected.norm())
    assert error < 1e-2
    assert not (error > 0) or error > 1e-6  # bf16, not a comparison with itself


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_masks_that_attention_can_honour(dtype):
    visible = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 0]]).bool()[:, None, None]

    def span(mask: torch.Tensor, new_tokens: int = 1) -> list[list[int]]:
        if dtype != torch.bool:
            mask = torch.where(mask, 0, torch.finfo(dtype).min).to(dtype)
        return visible_span(mask, new_tokens).T.tolist()

    assert span(visible) == [[0, 5], [2, 5]]
    several = visible.repeat(1, 1, 4, 1)
    for query in range(3):
        several[:, :, query, query + 2 :] = False
    assert span(several, 4) == [[0, 5], [2, 5]]  # the second row's first query is padding
    for row, token in ((0, 2), (1, 3), (0, 1)):  # holes
        broken = visible.clone()
        broken[row, :, :, token] = False
        assert span(broken)[row] == [-1, 5]
        assert span(broken)[1 - row] == [[0, 5], [2, 5]][1 - row]
    for query, token in ((0, 4), (1, 0), (3, 1), (0, 1)):  # successors, holes
        broken = several.clone()
        broken[0, :, query, token] ^= True
        assert span(broken, 4)[0][0] == -1
    assert span(torch.zeros_like(visible))[0][1] == 0  # no cache that answers is that short
    if dtype != torch.bool:
        soft = torch.where(visible, 0, torch.finfo(dtype).min).to(dtype)
        soft[0, 0, 0, 6] = -3.0
        assert visible_span(soft, 1).T.tolist() == [[-1, 5], [2, 5]]


def test_a_view_says_what_it_cannot_do():
    keys, values = states(1, 1, 200, 64)
    pair = StaticPair(keys, values, 300)
    after = append(pair, keys[:, :, :1], values[:, :, :1])
    key, value = (StaticView(pair, after, 1, (1, 1, 300, 64), part) for part in (0, 1))
    assert key.size(1) == 1
    assert key.size() == (1, 1, 300, 64)
    assert (key.ndim, key.dtype, key.device) == (4, torch.bfloat16, keys.device)
    for use in (
        lambda: keys @ key,
        lambda: torch.matmul(keys, key),
        lambda: key.transpose(2, 3),
        lambda: key[0],
        lambda: key.reshape(-1),
        lambda: key.expand(2, 2),
        lambda: F.scaled_dot_product_attention(keys[:, :, :1], value, key),
        lambda: F.scaled_dot_product_attention(keys[:, :, :1], key, values),
        lambda: F.scaled_dot_product_attention(keys[:, :, :1], key, value, dropout_p=0.5),
        lambda: F.scaled_dot_product_attention(keys[:, :, :2], key, value, is_causal=True),
        lambda: F.scaled_dot_product_attention(keys[:, :, :1], key, value, keys[0, 0]),
    ):
        with pytest.raises(CacheMisuseError, match="sdpa"):
            use()
    assert F.scaled_dot_product_attention(keys[:, :, :1], key, value).shape == (1, 1, 1, 64)


def test_a_compiled_model_is_one_graph_for_every_cache():
    """Dynamo traces the whole model (fullgraph) once; later caches of the capacity reuse it."""
    llama = model()
    ids = prompt(2, 190)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    options = {"max_new_tokens": 4, "attention_mask": mask, "pad_token_id": 0}
    expected = generate(llama, ids, GAACCache(), **options)
    compiling = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        cache = GAACCache(llama.config, max_tokens=260)
        found = generate(llama, ids, cache, compile_config=compiling, **options)
        assert torch.equal(found, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    reference = GAACCache()
    generate(llama, ids, reference, **options)
    assert cache.get_seq_length() == reference.get_seq_length() == 193
    assert cache.memory().packed_elements == reference.memory().packed_elements > 0


@slow_on_cpu  # a minute in the interpreter
def test_eager_steps_several_turns_and_crops():
    llama = model()
    ids = prompt(1, 420)
    cache, reference = GAACCache(llama.config, max_tokens=500), DynamicCache()
    start = 0
    for count in (3, 150, 1, 40, 100):  # the first prompt, short ones, a long one
        step = ids[:, start : start + count]
        found, expected = (forward(llama, step, held) for held in (cache, reference))
        assert float((found - expected).norm() / expected.norm()) < 0.03
        start += count
        assert cache.get_seq_length() == start
    cache.crop(-20)
    assert cache.get_seq_length() == start - 20
    keys, values = cache.dense(0)
    assert_same_bits(keys, reference.layers[0].keys[:, :, : start - 20])
    assert_same_bits(values, reference.layers[0].values[:, :, : start - 20])
    with pytest.raises(CacheMisuseError, match="max_tokens"):
        forward(llama, prompt(1, 300), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    forward(llama, ids, cache)
    assert cache.memory().tokens == 420
    assert "420" in repr(cache) or "256" in repr(cache)


def test_a_mask_with_holes_is_an_error_after_one_step():
    llama = model()
    mask = torch.ones(1, 200, dtype=torch.long, device=DEVICE)
    mask[0, 50:60] = 0
    cache = GAACCache(llama.config, max_tokens=300)
    options = {"attention_mask": mask, "disable_compile": True, "max_new_tokens": 20}
    with pytest.raises(CacheMisuseError, match="not causal with left padding"):
        generate(llama, prompt(1, 200), cache, **options)
    assert int(cache.layers[0].pair.memory.state[0, 0]) == 201


@slow_on_cpu  # a minute in the interpreter
def test_beams():
    llama = model()
    ids = prompt(1, 200)
    options = {"num_beams": 2, "max_new_tokens": 3, "pad_token_id": 0, "disable_compile": True}
    expected = generate(llama, ids, GAACCache(), **options)
    found = generate(llama, ids, GAACCache(llama.config, max_tokens=220), **options)
    assert torch.equal(found, expected)


def test_a_full_cache_is_an_error_before_the_step():
    llama = model()
    cache = GAACCache(llama.config, max_tokens=205)
    with pytest.raises(CacheMisuseError, match="205 of at most 205"):
        generate(llama, prompt(1, 200), cache, max_new_tokens=20, disable_compile=True)
    assert cache.get_seq_length() == 205
    with pytest.raises(CacheMisuseError, match="do not fit"):
        forward(llama, prompt(1, 300), GAACCache(llama.config, max_tokens=205))


def test_files_and_dynamic_caches(tmp_path):
    llama = model()
    ids = prompt(1, 300)
    dynamic = DynamicCache()
    forward(llama, ids, dynamic)
    cache = GAACCache.from_cache(dynamic, llama.config, max_tokens=400)
    assert_same_contents(cache, dynamic)
    forward(llama, ids[:, :5], cache)
    cache.save(tmp_path / "cache.safetensors")
    twin = copy.deepcopy(cache)
    loaded = GAACCache.load(tmp_path / "cache.safetensors", device=DEVICE)
    forward(llama, ids[:, :5], cache)
    for idx in range(2):
        keys, values = loaded.dense(idx)
        assert keys.shape[2] == 305
        assert_same_bits(twin.dense(idx)[0], keys)
        assert_same_bits(cache.dense(idx)[1][:, :, :305], values)


def test_where_it_cannot_be_static(caplog):
    llama = tiny_llama().to(DEVICE)
    llama.config.dtype = torch.float32  # as from_pretrained sets it
    ids = prompt(1, 200)
    expected = generate(llama, ids, DynamicCache(), max_new_tokens=5)
    cache = GAACCache(llama.config, max_tokens=220)
    assert not cache.is_compileable  # or `generate` would compile what grows
    assert torch.equal(generate(llama, ids, cache, max_new_tokens=5), expected)
    assert any("grows as needed" in record.message for record in caplog.records)
    llama = model()
    cache = GAACCache(llama.config, max_tokens=220)
    assert cache.is_compileable
    generate(llama, ids, cache, max_new_tokens=2, disable_compile=True)
    assert cache.is_compileable


def test_options():
    config = model().config
    with pytest.raises(ValueError, match="how many layers"):
        GAACCache(max_tokens=100)
    for wrong in (0, -1, 2.5, "100", True):
        with pytest.raises(ValueError, match="number of tokens"):
            GAACCache(config, max_tokens=wrong)
    for other in ({"kv_dtype": "fp8_e4m3"}, {"block_tokens": 64}, {"backend": "torch"}):
        with pytest.raises(ValueError, match="as they are by default"):
            GAACCache(config, max_tokens=100, **other)
    with pytest.raises(ValueError, match="for speed leave out offload"):
        GAACCache(config, max_tokens=100, offload="cpu")
    with pytest.raises(ValueError, match="16 query heads"):
        GAACCache(
            tiny_llama(hidden_size=68, num_attention_heads=17, num_key_value_heads=1).config,
            max_tokens=100,
        )
    config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="sdpa"):
        GAACCache(config, max_tokens=100)


def test_wrong_states():
    keys, values = states(1, 1, 200, 64)
    memory = StaticBlocks.allocate(keys, 2, pool_words=1000, raw_slots=1)
    with pytest.raises(ValueError, match="1 to 64 tokens"):
        packed_append(keys, values, memory, 300)
    with pytest.raises(ValueError, match="values: expected bfloat16"):
        packed_append(keys[:, :, :1], values[:, :, :1].float(), memory, 300)
