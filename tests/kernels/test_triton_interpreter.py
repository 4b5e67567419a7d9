"""The Triton kernels in Triton's interpreter, on a CPU, against their references."""

from __future__ import annotations

import os

import pytest
import torch

from hf_kvcodecs.errors import UnsupportedLayoutError
from hf_kvcodecs.kernels.exponent_pack import register_pack
from hf_kvcodecs.kernels.exponent_unpack import register_unpack
from hf_kvcodecs.kernels.packed_attention import packed_attention, unsupported_reason
from hf_kvcodecs.kernels.packed_attention.reference import packed_attention_reference
from hf_kvcodecs.kernels.register_blocks import RegisterBlocks
from hf_kvcodecs.kernels.register_reference import register_pack_reference
from hf_kvcodecs.store.packed import RegisterSegment

from .register_cases import adversarial, ordinary, same_bits

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 runs these on a CPU"
    ),
    # The interpreter computes NaN and infinity where a GPU would, with numpy's warnings.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def packed(keys: torch.Tensor, values: torch.Tensor) -> RegisterBlocks:
    batch, heads, tokens, head_dim = keys.shape
    blocks = RegisterBlocks.allocate(batch, heads, head_dim, tokens // 128, keys.device)
    register_pack_reference(keys, values, blocks)
    return blocks


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pack_writes_the_reference_bytes(head_dim):
    keys, values = ordinary(1, 1, 256, head_dim)
    keys[..., 128:, :] = adversarial(head_dim)["every pattern"][0]  # a raw block
    expected = packed(keys, values)
    blocks = RegisterBlocks.allocate(1, 1, head_dim, 2, "cpu")
    register_pack(keys[:, :, :128], values[:, :, :128], blocks)
    register_pack(keys[:, :, 128:], values[:, :, 128:], blocks)
    for name in ("table", "raw_count", "cursors"):
        assert torch.equal(getattr(blocks, name), getattr(expected, name)), name
    assert torch.equal(blocks.words[0], expected.words[0])
    used = int(blocks.cursors[0])
    assert torch.equal(blocks.pool[:used], expected.pool[:used])
    assert same_bits(blocks.raw[0], expected.raw[0])


@pytest.mark.parametrize("name", adversarial(64))
def test_pack_of_adversarial_blocks(name):
    keys, values = adversarial(64)[name]
    expected = packed(keys, values)
    blocks = RegisterBlocks.allocate(1, 1, 64, 1, "cpu")
    register_pack(keys, values, blocks)
    assert torch.equal(blocks.table, expected.table)
    assert torch.equal(blocks.cursors, expected.cursors)
    if int(blocks.table) >= 0:
        assert torch.equal(blocks.words, expected.words)
        used = int(blocks.cursors[0])
        assert torch.equal(blocks.pool[:used], expected.pool[:used])
    else:
        assert same_bits(blocks.raw[0], expected.raw[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_unpack_is_exact(head_dim):
    keys, values = ordinary(1, 2, 256, head_dim)
    blocks = packed(keys, values)
    found = register_unpack(blocks)
    assert same_bits(found[0], keys)
    assert same_bits(found[1], values)
    part = register_unpack(blocks, 1, 2)
    assert same_bits(part[0], keys[:, :, 128:])
    # Token-major, as staging areas are.
    into = [torch.zeros(300, 1, 2, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    register_unpack(blocks, into=[states[44:].permute(1, 2, 0, 3) for states in into])
    for states, wanted in zip(into, (keys, values), strict=True):
        assert same_bits(states[44:].permute(1, 2, 0, 3), wanted)
        assert not states[:44].any()


def test_a_segment_is_one_transfer():
    keys, values = ordinary(1, 2, 256, 64)
    keys[:, 1:, 128:] = adversarial(64)["every pattern"][0]  # a raw block
    segment = RegisterSegment.pack(keys, values)
    parts = (segment.blocks.words, segment.blocks.pool, segment.blocks.raw, segment.blocks.table)
    storage = segment.memory.untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() == storage for part in parts)
    for found, wanted in zip(segment.unpack(keys.device), (keys, values), strict=True):
        assert same_bits(found, wanted)
    moved = segment._moved(torch.device("cpu"))
    for found, wanted in zip(register_unpack(moved), (keys, values), strict=True):
        assert same_bits(found, wanted)


@pytest.mark.parametrize("name", adversarial(64))
def test_unpack_of_adversarial_blocks(name):
    keys, values = adversarial(64)[name]
    found = register_unpack(packed(keys, values))
    assert same_bits(found[0], keys)
    assert same_bits(found[1], values)


CASES = {
    "decode": {},
    "two tokens": {"q_tokens": 2},
    "five tokens of many heads": {"q_tokens": 5, "group": 16},
    "queries among sealed tokens": {"q_tokens": 5, "tail": 2},
    "no tail": {"tail": 0},
    "window": {"q_tokens": 3, "window": 70},
    "softcap": {"softcap": 3.0},
    "starts": {"q_tokens": 2, "starts": torch.tensor([0, 150], dtype=torch.int32), "batch": 2},
    "one start for all rows": {
        "starts": torch.tensor([150], dtype=torch.int32).expand(2),
        "batch": 2,
    },
    "a start in the tail": {"starts": torch.tensor([270, 3], dtype=torch.int32), "batch": 2},
    "sinks": {"sinks": torch.randn(4)},
    "lengths": {"batch": 2, "lengths": torch.tensor([270, 286], dtype=torch.int32)},
    "lengths, several tokens": {
        "batch": 2,
        "q_tokens": 3,
        "lengths": torch.tensor([257, 286], dtype=torch.int32),
    },
    "sealed tokens visible": {
        "batch": 2,
        "q_tokens": 3,
        "lengths": torch.tensor([270, 286], dtype=torch.int32),
        "starts": torch.tensor([10, 200], dtype=torch.int32),
        "sealed_visible": True,
    },
    "one split": {"splits": 1},
    "raw blocks only": {"head_dim": 80},
    "head_dim 96": {"head_dim": 96, "q_tokens": 2},
    "head_dim 128": {"head_dim": 128},
    "head_dim 256": {"head_dim": 256},
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    options = dict(CASES[name])
    batch, head_dim = options.pop("batch", 1), options.pop("head_dim", 64)
    q_tokens, group = options.pop("q_tokens", 1), options.pop("group", 2)
    tail, splits = options.pop("tail", 30), options.pop("splits", 2)
    keys, values = ordinary(batch, 2, 256 + tail, head_dim)
    keys[:, :1, 128:256, 3] *= 2.0**100  # this block stays raw
    keys[:, :1, 128:256, 3] = keys[:, :1, 128:256, 3].clamp(-4, 4)
    blocks = packed(keys[:, :, :256], values[:, :, :256])
    q = torch.randn(batch, 2 * group, q_tokens, head_dim).bfloat16()
    scale = head_dim**-0.5
    tails = keys[:, :, 256:], values[:, :, 256:]
    found = packed_attention(q, blocks, *tails, splits=splits, **options)
    options.pop("sealed_visible", None)
    expected = packed_attention_reference(q, keys, values, scale=scale, **options)
    # bf16 in the interpreter truncates, which is twice as far off as rounding.
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 8e-3
    assert found.shape == q.shape


def test_rows_that_sealed_less():
    keys, values = ordinary(2, 1, 256, 64)
    keys[1, 0, 128:, 3] = 2.0**20  # row 1 counts one block; its second is there, and raw
    blocks = packed(keys, values)
    assert int(blocks.table[1, 0, 1]) < 0
    tails = ordinary(2, 1, 40, 64, seed=1)
    q = torch.randn(2, 2, 1, 64).bfloat16()
    sealed = torch.tensor([2, 1], dtype=torch.int32)
    found = packed_attention(q, blocks, *tails, sealed=sealed, lengths=128 * sealed + 40, splits=2)
    for row, count in enumerate((256, 128)):
        k, v = (
            torch.cat([x[row : row + 1, :, :count], tail[row : row + 1]], 2)
            for x, tail in zip((keys, values), tails, strict=True)
        )
        expected = packed_attention_reference(q[row : row + 1], k, v, scale=0.125)
        assert (found[row : row + 1].float() - expected).norm() / expected.norm() < 8e-3


def test_nothing_sealed_yet():
    keys, values = ordinary(1, 2, 40, 64)
    blocks = RegisterBlocks.allocate(1, 2, 64, 3, "cpu")
    blocks.words.fill_(-1)  # a free slot may hold anything
    q = torch.randn(1, 4, 1, 64).bfloat16()
    found = packed_attention(q, blocks, keys, values, splits=3)
    expected = packed_attention_reference(q, keys, values, scale=0.125)
    assert (found.float() - expected).norm() / expected.norm() < 8e-3


def test_what_is_refused():
    keys, values = ordinary(1, 2, 128, 64)
    blocks = packed(keys, values)
    q = torch.randn(1, 4, 1, 64).bfloat16()
    assert unsupported_reason(q, blocks) is None
    for wrong, words in (
        (q.half(), "float16"),
        (q[..., :32], "shape"),
        (q[:, :3], "heads"),
        (q.repeat(1, 1, 65, 1), "65 query tokens"),
    ):
        assert words in unsupported_reason(wrong, blocks)
        with pytest.raises(UnsupportedLayoutError, match=words):
            packed_attention(wrong, blocks, keys[:, :, :0], values[:, :, :0])
    assert "scale" in unsupported_reason(q, blocks, scale=-1.0)
    with pytest.raises(ValueError, match="tail_keys"):
        packed_attention(q, blocks, keys[:, :1], values[:, :1])
    with pytest.raises(ValueError, match="lengths"):
        packed_attention(q, blocks, keys, values, sealed=torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="window"):
        packed_attention(q, blocks, keys[:, :, :0], values[:, :, :0], window=0)
    with pytest.raises(ValueError, match="multiple of 128"):
        register_pack(keys[:, :, :100], values[:, :, :100], blocks)
