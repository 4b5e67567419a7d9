"""Keys and values in the kernels' own memory: on a GPU, or with the kernels interpreted."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches import fused, lazy_attention
from hf_kvcodecs.caches.fused import FusedPair
from hf_kvcodecs.caches.lazy_attention import padding_starts
from hf_kvcodecs.caches.view import KVView
from hf_kvcodecs.errors import CacheMisuseError
from hf_kvcodecs.kernels import self_test
from hf_kvcodecs.kernels.self_test import kernels_fail

from ..harness import assert_same_bits, assert_same_contents, forward, prompt, tiny_llama
from ..kernels.register_cases import adversarial, ordinary

pytest.importorskip("triton", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 runs these on a CPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture
def fused_on_cpu(monkeypatch):
    monkeypatch.setattr(fused, "fused_device", lambda device: True)


def states(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = ordinary(*shape, seed)
    return keys.to(DEVICE), values.to(DEVICE)


def check(pair: FusedPair, keys: torch.Tensor, values: torch.Tensor) -> None:
    found = pair.dense()
    assert pair.tokens == keys.shape[2]
    assert_same_bits(found[0], keys)
    assert_same_bits(found[1], values)


def test_appending_and_sealing():
    keys, values = states(1, 1, 700, 64)
    pair, held = FusedPair(keys, values), 0
    for count in (300, 1, 20, 100, 60, 1, 150, 2):
        new = slice(held, held + count)
        pair.append(keys[:, :, new], values[:, :, new])
        held += count
        check(pair, keys[:, :, :held], values[:, :, :held])
        assert 0 <= pair.tail_tokens < 192
        assert pair.sealed_tokens % 128 == 0
    assert pair.sealed_tokens == 512
    early = pair.dense(130)
    assert_same_bits(early[0], keys[:, :, :130])


def test_inference_mode_and_out_of_it():
    keys, values = states(1, 1, 260, 64)
    with torch.inference_mode():
        pair = FusedPair(keys, values).append(keys * 1, values * 1)
    pair.append(keys[:, :, :1], values[:, :, :1])
    with torch.inference_mode():
        pair = pair.crop(250).select_batch(torch.tensor([0, 0]))
    pair.append(keys[:, :, :1].expand(2, -1, -1, -1), values[:, :, :1].expand(2, -1, -1, -1))
    assert_same_bits(pair.dense(250)[0], keys[:, :, :250].expand(2, -1, -1, -1))


def test_nothing_is_sealed_unless_asked():
    keys, values = states(1, 1, 700, 64)
    pair = FusedPair(keys, values)
    for start in range(0, 700, 100):
        new = slice(start, start + 100)
        pair.append(keys[:, :, new], values[:, :, new], seal=start >= 600)
        assert (pair.sealed_tokens > 0) == (start >= 600)
    check(pair, keys, values)
    assert pair.tail.shape[3] == fused.TAIL_TOKENS  # the long dense tail is given back


def test_a_pool_too_small(monkeypatch):
    """The prompt is packed again with as much room as it wants; later blocks stay raw, one by
    one."""
    keys, values = states(1, 1, 600, 64)
    monkeypatch.setattr(fused, "POOL_WORDS", 4)
    pair = FusedPair(keys, values).append(keys[:, :, :330], values[:, :, :330])
    assert pair.blocks.cursors.tolist()[1:] == [0, 0]
    for start in range(330, 600, 90):
        pair.append(keys[:, :, start : start + 90], values[:, :, start : start + 90])
        assert int(pair.blocks.cursors[0]) <= pair.blocks.pool.numel()
    assert pair.blocks.cursors.tolist()[2] == 0
    check(pair, keys, values)


def test_an_update_that_fails_half_way_is_not_forgotten(monkeypatch):
    keys, values = states(1, 1, 300, 64)
    pair = FusedPair(keys, values).append(keys[:, :, :150], values[:, :, :150])
    view = pair.snapshot()

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(fused, "register_pack", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pair.append(keys[:, :, 150:], values[:, :, 150:])
    for use in (pair.dense, view.dense, lambda: pair.append(keys, values), lambda: pair.crop(3)):
        with pytest.raises(CacheMisuseError, match="half way"):
            use()


def test_no_rows():
    keys, values = states(2, 1, 200, 64)
    pair = FusedPair(keys, values).append(keys, values)
    none = pair.select_batch(torch.tensor([], dtype=torch.int64))
    none.append(keys[:0], values[:0])
    assert none.dense()[0].shape == (0, 1, 400, 64)


def test_attention_that_is_answered_and_that_is_not():
    keys, values = states(2, 1, 200, 64)
    pair = FusedPair(keys, values).append(keys, values)
    key, value = (KVView(pair.snapshot(), part) for part in (0, 1))
    value.source = key.source
    q = torch.randn(2, 2, 1, 64, device=DEVICE).bfloat16()
    mask = torch.ones(1, 1, 1, 200, dtype=torch.bool, device=DEVICE)
    mask[..., :150] = False
    many = torch.randn(2, 2, 3, 64, device=DEVICE).bfloat16()
    causal = torch.ones(3, 200, dtype=torch.bool, device=DEVICE).tril(197)[None, None]
    causal = causal & mask
    fixed = torch.randn(2, 2, 1, 200, device=DEVICE).bfloat16()
    for query, options, answered in (
        (q, {"enable_gqa": True}, True),
        (q, {"enable_gqa": True, "attn_mask": mask}, True),  # one row for both
        (many, {"enable_gqa": True}, True),  # no mask: each sees all
        (many, {"enable_gqa": True, "is_causal": True}, False),
        (q, {"enable_gqa": True, "attn_mask": fixed}, False),
        (q[:1, :1], {}, False),  # broadcast
        (many, {"enable_gqa": True, "attn_mask": causal}, True),
        (many, {"enable_gqa": True, "attn_mask": causal.flip(2)}, False),
    ):
        before = lazy_attention.calls["fused"]
        found = F.scaled_dot_product_attention(query, key, value, **options)
        expected = F.scaled_dot_product_attention(
            query.float(), keys.float(), values.float(),
            **{k: v.float() if v is fixed else v for k, v in options.items()},
        )  # fmt: skip
        assert (lazy_attention.calls["fused"] - before == 1) == answered
        assert (found.float() - expected).norm() / expected.norm() < 1e-2


def test_blocks_that_stay_raw_never_run_out_of_room():
    """A prompt of nothing but raw blocks, then single raw blocks while decoding."""
    raw = adversarial(64)["every pattern"][0].to(DEVICE).expand(1, 2, -1, -1)
    keys = raw.repeat(1, 1, 3, 1)
    keys = torch.where(keys.isfinite(), keys, 1.0)
    keys[..., :2] *= 2.0**60  # keys this large stay raw
    values = keys.flip(2)
    pair = FusedPair(keys, values).append(keys[:, :, :320], values[:, :, :320])
    for token in range(320, 384):
        pair.append(keys[:, :, token : token + 1], values[:, :, token : token + 1])
    assert int(pair.blocks.cursors[1]) > 0
    assert int(pair.blocks.cursors[2]) == 0
    check(pair, keys, values)


def test_crops():
    keys, values = states(1, 1, 420, 64)
    pair = FusedPair(keys, values).append(keys, values)
    view = pair.snapshot()
    pair = pair.crop(400)
    check(pair, keys[:, :, :400], values[:, :, :400])
    with pytest.raises(CacheMisuseError, match="crop"):
        view.dense()
    pair = pair.crop(150)  # into a sealed block
    check(pair, keys[:, :, :150], values[:, :, :150])
    pair.append(keys[:, :, 150:], values[:, :, 150:])
    check(pair, keys, values)
    check(pair.crop(0), keys[:, :, :0], values[:, :, :0])


@pytest.mark.parametrize("rows", [[2, 2, 0], [1], [0, 0, 1, 1, 2]])
def test_rows(rows):
    keys, values = states(3, 1, 200, 64)
    keys[1, :, :128, 3] = 2.0**20  # raw
    pair = FusedPair(keys, values).append(keys, values)
    chosen = pair.select_batch(torch.tensor(rows))
    check(chosen, keys[rows], values[rows])
    more, other = states(len(rows), 1, 130, 64, seed=5)
    chosen.append(more, other)  # new blocks must not fall on those that rows share
    check(chosen, torch.cat([keys[rows], more], 2), torch.cat([values[rows], other], 2))


def test_kernels_that_do_not_work_are_not_used(monkeypatch):
    """A GPU or a Triton on which they give other bits: plain torch, with a notice."""
    keys, values = states(1, 1, 20, 64)
    monkeypatch.setattr(fused, "fused_device", lambda device: True)
    assert fused.can_fuse(keys, values)
    assert kernels_fail(keys.device, 64) is None
    monkeypatch.setattr(self_test, "register_unpack", lambda blocks: (values, keys))
    kernels_fail.cache_clear()
    assert "other bits" in kernels_fail(keys.device, 64)
    assert not fused.can_fuse(keys, values)
    kernels_fail.cache_clear()


def test_copies_are_independent():
    keys, values = states(1, 1, 300, 64)
    pair = FusedPair(keys, values).append(keys, values)
    other = copy.deepcopy(pair)
    other.append(values, keys)
    check(pair, keys, values)
    check(other, torch.cat([keys, values], 2), torch.cat([values, keys], 2))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_which_masks_are_left_padding(kind):
    visible = torch.ones(3, 1, 1, 10, dtype=torch.bool)
    visible[1, ..., :4] = False
    visible[2, ..., :9] = False

    def mask(rows: torch.Tensor) -> torch.Tensor:
        if kind == "bool":
            return rows.clone()
        return torch.zeros(rows.shape).masked_fill(~rows, torch.finfo(torch.float32).min)

    assert padding_starts(mask(visible)).tolist() == [0, 4, 9]
    with torch.inference_mode():  # such tensors do not say whether they were changed
        given = mask(visible)
        assert padding_starts(given).tolist() == [0, 4, 9]
        given[1] = given[0]
        assert padding_starts(given).tolist() == [0, 0, 9]
    holes = visible.clone()
    holes[0, ..., 5] = False
    assert padding_starts(mask(holes)) is None
    given = mask(visible)
    assert padding_starts(given).tolist() == [0, 4, 9]
    given[2, ..., 9] = False if kind == "bool" else -1.0  # changed in place: looked at again
    starts = padding_starts(given)
    assert starts is None if kind == "float" else starts.tolist() == [0, 4, 10]


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(F.cosine_similarity(left.float().flatten(), right.float().flatten(), 0))


@pytest.mark.compat
@pytest.mark.parametrize("padding", [0, 90])
def test_a_model_decodes_through_the_kernel(fused_on_cpu, monkeypatch, padding):
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=2, num_key_value_heads=1,
        num_attention_heads=2,
    ).to(DEVICE)  # fmt: skip
    model.model.embed_tokens.weight.data[0] = model.model.embed_tokens.weight.data[5]  # not zeros
    ids = torch.nn.functional.pad(prompt(210, 2).to(DEVICE), (padding, 0))
    mask = (ids != 0).long()
    packed, dynamic = GAACCache(), DynamicCache()
    for cache in (packed, dynamic):
        forward(model, ids, cache, attention_mask=mask)
    assert_same_contents(packed, dynamic)
    assert packed.layers[0].pair.sealed_tokens == 128
    before = lazy_attention.calls.copy()
    for step in range(2):
        token = prompt(1, 2, seed=step).to(DEVICE)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        found, expected = (
            forward(model, token, cache, attention_mask=mask) for cache in (packed, dynamic)
        )
        assert cosine(found, expected) > 0.999
    # On a CPU, and before 5.24, a mask makes transformers repeat keys and values.
    assert (lazy_attention.calls - before)["fused"] == 4
    assert (lazy_attention.calls - before)["dense"] == 0
    if padding:
        monkeypatch.setattr(
            lazy_attention, "padding_starts", lambda mask: torch.zeros_like(ids[:, 0])
        )
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        found, expected = (
            forward(model, token, cache, attention_mask=mask) for cache in (packed, dynamic)
        )
        assert cosine(found, expected) < 0.998  # so the comparisons above can fail


def test_several_tokens_and_repeated_heads(fused_on_cpu):
    """What chunked prefill and drafts do: a causal mask, for which transformers repeats heads."""
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=1, num_key_value_heads=1,
        num_attention_heads=2,
    ).to(DEVICE)  # fmt: skip
    packed, dynamic = GAACCache(), DynamicCache()
    before = lazy_attention.calls.copy()
    for count, seed in ((200, 1), (5, 2)):
        ids = prompt(count, 2, seed=seed).to(DEVICE)
        found, expected = (forward(model, ids, cache) for cache in (packed, dynamic))
    assert cosine(found, expected) > 0.999
    assert lazy_attention.calls - before == {"fused": 1}
    keys = packed.layers[0].keys
    assert isinstance(keys, KVView)
    grouped = keys[:, :, None, :, :].expand(2, 1, 3, 205, 64)
    repeated = grouped.reshape(2, 3, 205, 64)
    assert isinstance(repeated, KVView)
    assert_same_bits(repeated.dense(), dynamic.layers[0].keys.repeat_interleave(3, 1))
    assert_same_bits(grouped.dense(), dynamic.layers[0].keys[:, :, None].expand(-1, -1, 3, -1, -1))
    for other in (
        keys[:, :, None],
        keys[:, :, 3:],
        keys.reshape(2, 205, 64),
        grouped[0],
        keys[torch.tensor([1], device=DEVICE)],
        grouped.reshape(-1),
        grouped.reshape((2, -1)),
        keys[1:],
    ):
        assert type(other) is torch.Tensor


@pytest.mark.compat
def test_save_load_move(fused_on_cpu, tmp_path):
    model = tiny_llama(torch.bfloat16, head_dim=64, num_hidden_layers=1, num_key_value_heads=1)
    model.to(DEVICE)
    packed, dynamic = GAACCache(), DynamicCache()
    ids = prompt(270).to(DEVICE)
    for cache in (packed, dynamic):
        forward(model, ids, cache)
    assert isinstance(packed.layers[0].pair, FusedPair)
    packed.save(tmp_path / "cache")
    loaded = GAACCache.load(tmp_path / "cache", device=DEVICE)
    assert_same_contents(loaded, dynamic)
    for cache in (loaded, dynamic):
        forward(model, prompt(3).to(DEVICE), cache)
    assert isinstance(loaded.layers[0].pair, FusedPair)
    assert_same_contents(loaded, dynamic)
    report = loaded.memory()
    assert report.tokens == 273
    assert report.packed_elements == 2 * 64 * loaded.layers[0].pair.sealed_tokens
    loaded.crop(-100)
    dynamic.crop(-100)
    assert_same_contents(loaded, dynamic)
    loaded.reset()
    assert loaded.get_seq_length() == 0
