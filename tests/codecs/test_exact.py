"""Exact codecs give back every bit pattern, whatever the shape, the strides or the content."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcodecs import CorruptDataError, UnsupportedLayoutError
from hf_kvcodecs.codecs import CODECS, RawCodec, codec_for, codec_from_config
from hf_kvcodecs.codecs.words import WORD_DTYPES, to_words

from ..harness import EXACT_DTYPES, assert_same_bits, check_round_trip, decoded, dtype_id

every_dtype = pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=dtype_id)


def real_shaped(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers with one scale per channel, as words."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randn(shape[-1], generator=generator))
    return to_words((torch.randn(shape, generator=generator) * scale).to(dtype))


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit or 8-bit dtype, as ``[1, kv_heads, blocks, 128, 64]`` words."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).repeat(128 * 64 // 256).view(1, 1, 1, 128, 64)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(2, 1, 4, 128, 64)


@pytest.mark.compat
@pytest.mark.parametrize("backend", ["torch", "compile"])
@pytest.mark.parametrize("dtype", [d for d in EXACT_DTYPES if d.itemsize < 4], ids=dtype_id)
def test_every_pattern_returns(dtype, backend):
    patterns = all_patterns(dtype)
    check_round_trip(codec_for(dtype, backend=backend), patterns)
    shuffled = patterns.flatten()[torch.randperm(patterns.numel())].view_as(patterns)
    check_round_trip(codec_for(dtype, backend=backend), shuffled)


def test_every_upper_half_of_float32_returns():
    upper = all_patterns(torch.bfloat16).to(torch.int32) << 16
    lower = torch.randint(0, 2**16, upper.shape, dtype=torch.int32)
    check_round_trip(codec_for(torch.float32), upper | lower)


ADVERSARIAL = {
    "zeros": lambda shape: torch.zeros(shape),
    "negative zeros": lambda shape: -torch.zeros(shape),
    "infinities": lambda shape: torch.full(shape, float("-inf")),
    "nan": lambda shape: torch.full(shape, float("nan")),
    "every element a misfit": lambda shape: torch.exp2(torch.randint(-120, 120, shape).float()),
    "subnormals": lambda shape: torch.full(shape, 1e-40),
    "one huge channel": lambda shape: torch.randn(shape).index_fill(-1, torch.tensor([3]), 3e38),
    "one huge token": lambda shape: torch.randn(shape).index_fill(-2, torch.tensor([0]), 1e30),
    "constant": lambda shape: torch.ones(shape),
}


@every_dtype
@pytest.mark.parametrize("content", ADVERSARIAL, ids=lambda name: name.replace(" ", "-"))
def test_adversarial_content_returns(dtype, content):
    values = ADVERSARIAL[content]((2, 2, 1, 32, 6)).to(dtype)
    check_round_trip(codec_for(dtype, block_tokens=32), to_words(values))


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(EXACT_DTYPES))
    block_tokens = draw(st.sampled_from([16, 32, 128]))
    shape = (
        draw(st.integers(0, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        block_tokens,
        draw(st.integers(1, 40)),
    )
    kinds = draw(
        st.lists(st.sampled_from(["normal", "bits", "zeros", "huge"]), min_size=1, max_size=3)
    )
    strides = draw(st.permutations(range(5)))
    return dtype, block_tokens, shape, kinds, strides, draw(st.integers(0, 2**31))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_fuzzed_shapes_strides_and_contents_return(case):
    dtype, block_tokens, shape, kinds, order, seed = case
    generator = torch.Generator().manual_seed(seed)
    scattered = [shape[axis] for axis in order]
    size = torch.Size(scattered).numel()
    words = torch.zeros(size, dtype=WORD_DTYPES[dtype])
    for kind in kinds:
        chosen = torch.rand(size, generator=generator) < 0.6
        values = torch.randn(size, generator=generator) * (1e30 if kind == "huge" else 1.0)
        new = to_words(values.to(dtype))
        if kind == "bits":
            raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
            new = raw.to(torch.uint8).view(words.dtype)
        elif kind == "zeros":
            new = torch.zeros_like(words)
        words = torch.where(chosen, new, words)
    inverse = [list(order).index(axis) for axis in range(5)]
    check_round_trip(
        codec_for(dtype, block_tokens=block_tokens), words.view(scattered).permute(inverse)
    )


@every_dtype
def test_select_slice_and_cat_move_records_with_their_pools(dtype):
    codec = codec_for(dtype, block_tokens=32)
    words = real_shaped((3, 2, 4, 32, 10), dtype)
    nan = to_words(torch.full((2, 32, 10), float("nan")).to(dtype))
    words[2, :, 1] = nan  # records of very different sizes
    packed = codec.encode(words)
    rows, blocks = torch.tensor([2, 0, 2, 1]), torch.tensor([3, 1])
    chosen = packed.select(0, rows).select(2, blocks)
    codec.check(chosen, 10)
    assert_same_bits(decoded(codec, chosen, 10), words[rows][:, :, blocks])
    joined = packed.cat([packed.slice_blocks(2, 4), packed.slice_blocks(0, 2)])
    codec.check(joined, 10)
    assert_same_bits(decoded(codec, joined, 10), torch.cat([words[:, :, 2:], words[:, :, :2]], 2))
    assert int(packed.block_nbytes.sum()) == packed.nbytes


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        (torch.bfloat16, 1.40),
        (torch.float16, 1.11),
        (torch.float32, 1.16),
        (torch.float8_e4m3fn, 1.10),
        (torch.float8_e5m2, 1.25),
    ],
    ids=dtype_id,
)
def test_normal_numbers_shrink(dtype, factor):
    """Less regular than real keys and values, whose factors tests/test_real_model.py holds to their
    targets."""
    words = real_shaped((4, 1, 2, 128, 64), dtype)
    packed = codec_for(dtype).encode(words)
    assert words.nbytes / packed.nbytes >= factor


def test_packed_blocks_own_their_memory():
    words = real_shaped((1, 1, 1, 16, 8), torch.float64)
    packed = RawCodec(dtype=torch.float64, block_tokens=16).encode(words)
    words.zero_()
    assert bool(packed.planes["raw"].any())


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"id": "lz77", "version": 1}, ValueError),
        ({"id": "exponent", "version": 2, "float_format": "bf16"}, UnsupportedLayoutError),
        ({"id": "exponent", "float_format": "bf16"}, UnsupportedLayoutError),
        ({"id": "exponent", "version": 1, "colour": "red"}, ValueError),
        ({"id": "exponent", "version": 1, "float_format": "bf17"}, ValueError),
        ({"id": "exponent", "version": 1, "block_tokens": 100}, ValueError),
        ({"id": "raw", "version": 1, "dtype": "complex64"}, ValueError),
    ],
    ids=str,
)
def test_bad_configs_are_refused(config, error):
    with pytest.raises(error, match=r"expected|not supported|unknown"):
        codec_from_config(config)


def test_every_codec_is_registered_under_its_id():
    assert {name: codec.id for name, codec in CODECS.items()} == {name: name for name in CODECS}


@every_dtype
def test_contradicting_bytes_are_refused(dtype):
    codec = codec_for(dtype, block_tokens=32)
    packed = codec.encode(real_shaped((2, 1, 2, 32, 8), dtype))
    counts = packed.counts["escapes"].clone()
    counts[0] += 1
    damaged = [
        {"planes": packed.planes | {"bits": packed.planes["bits"][..., :-1]}},
        {"planes": {name: p for name, p in packed.planes.items() if name != "tags"}},
        {"planes": packed.planes | {"tags": packed.planes["tags"] ^ 1}},
        {"pools": packed.pools | {"escapes": packed.pools["escapes"][1:]}},
        {"counts": packed.counts | {"escapes": counts}},
    ]
    for change in damaged:
        with pytest.raises(CorruptDataError):
            codec.check(
                type(packed)(**{name: getattr(packed, name) for name in packed.__slots__} | change),
                8,
            )


def test_wrong_words_are_refused():
    codec = codec_for(torch.bfloat16)
    with pytest.raises(ValueError, match="words: expected"):
        codec.encode(torch.zeros(1, 1, 1, 100, 8, dtype=torch.int16))
    packed = codec.encode(torch.zeros(1, 1, 1, 128, 8, dtype=torch.int16))
    for shape in ((2, 1, 3, 8), (1, 1, 8)):
        with pytest.raises(ValueError, match="tail: expected"):
            codec.decode(packed, torch.zeros(shape, dtype=torch.int16))
    with pytest.raises(ValueError, match="tail: expected"):
        codec.decode(packed, torch.zeros(1, 1, 3, 8, dtype=torch.int32))
    with pytest.raises(TypeError, match="dtype: expected"):
        codec_for(torch.complex64)
