"""Each method of the transformers layer contract leaves the very bits that DynamicCache holds."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.layer import GAACLayer

from ..harness import assert_same_bits, assert_same_contents, dtype_id, filled_pair, forward, prompt

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def states(
    tokens: int,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    head_dim: int = 8,
):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, tokens, head_dim, generator=generator).to(dtype)


def two_layers(tokens: int, **options: object) -> tuple[GAACLayer, DynamicLayer]:
    """A packed and a dense layer with the same tokens."""
    packed, dynamic = GAACCache(block_tokens=16, **options), DynamicCache()
    for cache in (packed, dynamic):
        cache.update(states(tokens), states(tokens, seed=1), 0)
    return packed.layers[0], dynamic.layers[0]


def assert_layers_equal(packed: GAACLayer, dynamic: DynamicLayer) -> None:
    assert packed.get_seq_length() == dynamic.get_seq_length()
    if dynamic.get_seq_length():
        for mine, theirs in zip(packed.pair.dense(), (dynamic.keys, dynamic.values), strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.compat
@every_dtype
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 48, 61])
@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_then_single_tokens(tiny_models, dtype, tokens, batch):
    model, ids = tiny_models[dtype], prompt(tokens + 40, batch)
    packed, dynamic = filled_pair(model, ids[:, :tokens], block_tokens=16)
    for position in range(tokens, ids.shape[1]):
        step = ids[:, position : position + 1]
        assert_same_bits(forward(model, step, packed), forward(model, step, dynamic))
    assert_same_contents(packed, dynamic)
    assert packed.layers[0].pair.sealed_tokens == (tokens + 40) // 16 * 16


@pytest.mark.parametrize("pieces", [[7, 30, 1, 1, 25], [16, 16, 16], [1] * 20, [100, 3]], ids=str)
def test_prefill_in_pieces(tiny_models, pieces):
    model, ids = tiny_models[torch.bfloat16], prompt(sum(pieces), 2)
    packed, dynamic = GAACCache(block_tokens=16), DynamicCache()
    start = 0
    for size in pieces:
        piece = ids[:, start : start + size]
        assert_same_bits(forward(model, piece, packed), forward(model, piece, dynamic))
        start += size
    assert_same_contents(packed, dynamic)


@pytest.mark.compat
@pytest.mark.parametrize("remove", [0, 1, 5, 13, 14, 29, 30, 31, 46, 60, 61, 99])
def test_crop_anywhere_then_go_on(remove):
    packed, dynamic = two_layers(61)
    packed.crop(-remove)
    dynamic.crop(-remove)
    assert_layers_equal(packed, dynamic)
    assert packed.pair.sealed_tokens <= packed.get_seq_length()
    for layer in (packed, dynamic):
        layer.update(states(37, seed=2), states(37, seed=3))
    assert_layers_equal(packed, dynamic)


@pytest.mark.compat
def test_crop_by_a_tensor():
    """transformers 5.17 counts the tokens to remove in a tensor."""
    packed, dynamic = two_layers(61)
    packed.crop(torch.tensor(-20))
    dynamic.crop(-20)
    assert_layers_equal(packed, dynamic)


def test_crop_of_an_empty_layer_and_of_a_positive_number():
    layer = GAACLayer()
    layer.crop(-3)
    layer.crop(0)
    assert layer.get_seq_length() == 0
    with pytest.raises(ValueError, match="crop: expected 0 or a negative number"):
        layer.crop(3)


def test_crop_frees_what_it_removes():
    packed, _ = two_layers(160)
    before = sum(s.packed_nbytes for s in packed.sequences)
    packed.crop(-81)
    held = {
        tensor.untyped_storage().nbytes() - tensor.nbytes
        for sequence in packed.sequences
        for segment in sequence.segments
        for group in (segment.packed.planes, segment.packed.pools, segment.packed.counts)
        for tensor in group.values()
    }
    assert held == {0}, "a slice keeps the whole block's memory alive"
    assert sum(s.packed_nbytes for s in packed.sequences) < before * 0.55


BATCH_OPERATIONS = {
    "repeat": lambda layer: layer.batch_repeat_interleave(3),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "select-mask": lambda layer: layer.batch_select_indices(torch.tensor([False, True])),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "negative": lambda layer: layer.batch_select_indices(torch.tensor([-1, 0])),
    "swap": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
}


@pytest.mark.compat
@pytest.mark.parametrize("tokens", [3, 16, 61])
@pytest.mark.parametrize("name", BATCH_OPERATIONS)
def test_batch_operations(name, tokens):
    packed, dynamic = two_layers(tokens)
    sealed = packed.pair.sealed_tokens
    for layer in (packed, dynamic):
        BATCH_OPERATIONS[name](layer)
    assert_layers_equal(packed, dynamic)
    assert packed.pair.sealed_tokens == sealed
    rows = dynamic.keys.shape[0]
    for layer in (packed, dynamic):
        layer.update(states(30, rows, seed=4), states(30, rows, seed=5))
        layer.crop(-25)
    assert_layers_equal(packed, dynamic)


def test_operations_on_an_empty_cache():
    cache = GAACCache()
    cache.reset()
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.memory().factor == 1.0
    assert not cache.is_compileable
    assert "none yet" in repr(cache)


def test_reset_serves_another_prompt_of_another_batch_size(tiny_models):
    model = tiny_models[torch.bfloat16]
    packed, _ = filled_pair(model, prompt(50, 2), block_tokens=16)
    packed.reset()
    assert packed.get_seq_length() == 0
    assert packed.memory().total_bytes == 0
    fresh, dynamic = filled_pair(model, prompt(20, 3, seed=7), block_tokens=16)
    assert_same_bits(
        forward(model, prompt(20, 3, seed=7), packed),
        forward(model, prompt(20, 3, seed=7), GAACCache()),
    )
    assert_same_contents(packed, dynamic)
    assert_same_contents(fresh, dynamic)


def test_deepcopy_is_independent(tiny_models):
    model = tiny_models[torch.bfloat16]
    packed, dynamic = filled_pair(model, prompt(50), block_tokens=16)
    twin = copy.deepcopy(packed)
    forward(model, prompt(20, seed=3), packed)
    packed.crop(-40)
    assert_same_contents(twin, dynamic)
    assert twin.options == packed.options


def test_keys_and_values_of_different_widths_and_dtypes():
    """Multi-head latent attention gives two widths, autocast two dtypes."""
    packed, dynamic = GAACCache(block_tokens=16), DynamicCache()
    for step, tokens in enumerate((40, 1, 1)):
        keys = states(tokens, dtype=torch.float32, seed=step)
        values = states(tokens, dtype=torch.bfloat16, seed=step + 9, head_dim=5)
        for cache in (packed, dynamic):
            cache.update(keys, values, 0)
    assert len(packed.layers[0].sequences) == 2
    assert_same_contents(packed, dynamic)
    packed.reorder_cache(torch.tensor([1, 0]))
    dynamic.reorder_cache(torch.tensor([1, 0]))
    packed.crop(-20)
    dynamic.crop(-20)
    assert_same_contents(packed, dynamic)


def test_float64_is_kept_exactly_and_says_so(caplog):
    packed, dynamic = GAACCache(block_tokens=16), DynamicCache()
    for cache in (packed, dynamic):
        cache.update(states(40, dtype=torch.float64), states(40, dtype=torch.float64, seed=1), 0)
    assert_same_contents(packed, dynamic)


def test_adversarial_states_stay_raw_and_small(tiny_models):
    """Blocks that packing would blow up are kept as they are; their neighbours are packed."""
    wild = torch.randint(-(2**15), 2**15, (2, 3, 32, 8)).to(torch.int16).view(torch.bfloat16)
    keys = torch.cat([states(32), wild, states(33, seed=2)], dim=2)
    packed, dynamic = GAACCache(block_tokens=16), DynamicCache()
    for cache in (packed, dynamic):
        cache.update(keys, keys.flip(0), 0)
    assert_same_contents(packed, dynamic)
    kinds = [segment.codec.id for segment in packed.layers[0].sequences[0].segments]
    assert kinds == ["exponent", "raw", "exponent"]
    assert packed.memory().ratio < 1.02
    for cache in (packed, dynamic):
        cache.crop(-40)
        cache.update(states(30, seed=3), states(30, seed=4), 0)
        cache.reorder_cache(torch.tensor([1, 0]))
    assert_same_contents(packed, dynamic)


def test_pack_from_keeps_short_sequences_dense():
    cache = GAACCache(block_tokens=16, pack_from=64)
    cache.update(states(63), states(63, seed=1), 0)
    assert cache.memory().packed_bytes == 0
    cache.update(states(1, seed=2), states(1, seed=3), 0)
    assert cache.layers[0].pair.sealed_tokens == 64
    reference = DynamicCache()
    reference.update(states(63), states(63, seed=1), 0)
    reference.update(states(1, seed=2), states(1, seed=3), 0)
    assert_same_contents(cache, reference)


def test_a_block_is_packed_once(monkeypatch):
    """History is never encoded again: as many blocks are encoded as are sealed."""
    from hf_kvcodecs.codecs import ExponentCodec

    encoded = []
    encode = ExponentCodec.encode

    def counting(self, words):
        encoded.append(words.shape[2])
        return encode(self, words)

    monkeypatch.setattr(ExponentCodec, "encode", counting)
    cache = GAACCache(block_tokens=16)
    cache.update(states(50), states(50), 0)
    for step in range(60):
        cache.update(states(1, seed=step), states(1, seed=step), 0)
    assert sum(encoded) == 110 // 16


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_holds_the_cast_values_exactly(kv_dtype):
    """The cast is the user's lossy choice, saturating; what follows it loses nothing."""
    stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_dtype]
    keys = states(40) * 3
    keys[0, 0, 0, 0], keys[0, 0, 1, 0], keys[0, 0, 2, 0] = 1e9, -1e9, float("nan")
    limit = torch.finfo(stored).max
    expected = (
        torch.where(keys.isnan(), keys, keys.clamp(-limit, limit)).to(stored).to(torch.bfloat16)
    )
    cache = GAACCache(block_tokens=16, kv_dtype=kv_dtype)
    returned, _ = cache.update(keys, keys, 0)
    for found in (returned + 0, *cache.dense(0)):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert cache.memory().ratio < 0.6
    cache.crop(-13)
    assert torch.equal(cache.dense(0)[0].nan_to_num(), expected[:, :, :27].nan_to_num())


def test_from_cache_packs_a_dynamic_cache(tiny_models):
    model = tiny_models[torch.bfloat16]
    _, dynamic = filled_pair(model, prompt(50, 2))
    packed = GAACCache.from_cache(dynamic, block_tokens=16)
    assert_same_contents(packed, dynamic)
    assert packed.layers[0].pair.sealed_tokens == 48
    step = prompt(1, 2, seed=5)
    assert_same_bits(forward(model, step, packed), forward(model, step, dynamic))
    assert GAACCache.from_cache(DynamicCache()).get_seq_length() == 0
    with pytest.raises(TypeError, match="expected a DynamicCache"):
        GAACCache.from_cache([1, 2])


def test_iteration_yields_dense_layers(tiny_models):
    packed, dynamic = filled_pair(tiny_models[torch.bfloat16], prompt(50), block_tokens=16)
    for mine, theirs in zip(packed, dynamic, strict=True):
        assert_same_bits(mine[0], theirs[0])
        assert_same_bits(mine[1], theirs[1])


def test_crop_to_a_block_boundary_frees_the_tail():
    packed, _ = two_layers(61)
    packed.crop(-29)
    for sequence in packed.sequences:
        assert sequence.tail.untyped_storage().nbytes() == sequence.tail.nbytes == 0


@pytest.mark.parametrize("options", [{}, {"pack_from": 1000}, {"kv_dtype": "fp8_e5m2"}], ids=str)
def test_reading_leaves_no_dense_copy_behind(tiny_models, options):
    model = tiny_models[torch.bfloat16]
    packed, _ = filled_pair(model, prompt(50), block_tokens=16, **options)
    packed.dense(0)
    assert packed.layers[1].keys.sum().isfinite()
    assert len(list(packed)) == 3
    GAACCache.from_cache(packed)
    forward(model, prompt(1), packed)
    assert all(layer.pair._dense is None for layer in packed.layers)


def test_offload_and_prefetch_keep_the_contents():
    packed, dynamic = two_layers(40)
    packed.offload()
    packed.prefetch()
    assert_layers_equal(packed, dynamic)


def test_memory_counts_every_tensor(tiny_models):
    packed, _ = filled_pair(tiny_models[torch.bfloat16], prompt(50, 2), block_tokens=16)
    report = packed.memory()
    total = 0
    for layer in packed.layers:
        for sequence in layer.sequences:
            total += sequence.tail.untyped_storage().nbytes()
            for segment in sequence.segments:
                groups = (segment.packed.planes, segment.packed.pools, segment.packed.counts)
                total += sum(
                    t.untyped_storage().nbytes() for group in groups for t in group.values()
                )
    assert report.total_bytes == total
    assert report.tokens == 50
    assert report.dense_bytes == 3 * 2 * 2 * 2 * 50 * 16 * 2
    assert report.packed_elements == 3 * 2 * 2 * 2 * 48 * 16
    assert report.factor == pytest.approx(report.dense_bytes / total)
    assert 11 < report.bits_per_element < 16
