"""The Triton kernels on a GPU: exact bytes, exact unpacking, attention against fp32."""

from __future__ import annotations

import pytest
import torch

from hf_kvcodecs.kernels.exponent_pack import register_pack
from hf_kvcodecs.kernels.exponent_unpack import register_unpack
from hf_kvcodecs.kernels.packed_attention import packed_attention
from hf_kvcodecs.kernels.packed_attention.reference import packed_attention_reference
from hf_kvcodecs.kernels.register_blocks import RegisterBlocks
from hf_kvcodecs.kernels.register_reference import (
    register_pack_reference,
    register_unpack_reference,
)

from .kernels.register_cases import adversarial, ordinary, same_bits

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]


def packed(keys: torch.Tensor, values: torch.Tensor) -> RegisterBlocks:
    batch, heads, tokens, head_dim = keys.shape
    blocks = RegisterBlocks.allocate(batch, heads, head_dim, tokens // 128, "cuda")
    register_pack(keys.cuda(), values.cuda(), blocks)
    blocks.check()
    return blocks


def assert_close_to_fp32(found: torch.Tensor, q, keys, values, **options) -> None:
    """At most twice the error of plain attention in bf16, by relative norm."""
    scale = q.shape[3] ** -0.5
    expected = packed_attention_reference(q, keys, values, scale=scale, **options)
    assert bool(found.isfinite().all())
    error = float((found.float() - expected).norm() / expected.norm())
    rounded = packed_attention_reference(q, keys, values, scale=scale, **options).bfloat16()
    # bf16 weights, then a bf16 result: each rounds by 2**-9 at most, 2**-9.8 on average.
    plain = float((rounded.float() - expected).norm() / expected.norm())
    assert error <= 2 * plain, (error, plain)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pack_and_unpack(head_dim):
    keys, values = ordinary(2, 3, 512, head_dim)
    blocks = packed(keys, values)
    host = RegisterBlocks.allocate(2, 3, head_dim, 4, "cpu")
    register_pack_reference(keys, values, host)
    assert int(blocks.cursors[0]) == int(host.cursors[0])
    assert torch.equal(blocks.table.cpu(), host.table)
    for name in ("words", "pool", "raw", "table"):
        setattr(host, name, getattr(blocks, name).cpu())
    for found in (register_unpack_reference(host), register_unpack(blocks)):
        for kind, expected in zip(found, (keys, values), strict=True):
            different = kind.cpu().view(torch.int16) != expected.view(torch.int16)
            assert not bool(different.any()), different.nonzero()[:8].tolist()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_adversarial_blocks(head_dim):
    for name, (keys, values) in adversarial(head_dim).items():
        found = register_unpack(packed(keys, values))
        assert same_bits(found[0], keys), name
        assert same_bits(found[1], values), name


CASES = {
    "decode": {},
    "group of 16": {"group": 16},
    "8 tokens": {"q_tokens": 8},
    "25 tokens": {"q_tokens": 25},
    "64 tokens": {"q_tokens": 64, "group": 16},
    "window": {"window": 300},
    "softcap": {"softcap": 5.0, "q_tokens": 2},
    "sinks": {"sinks": torch.randn(8)},
    "head_dim 64": {"head_dim": 64},
    "head_dim 80": {"head_dim": 80},
    "head_dim 96": {"head_dim": 96},
    "head_dim 256": {"head_dim": 256},
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    options = dict(CASES[name])
    head_dim, group = options.pop("head_dim", 128), options.pop("group", 4)
    q_tokens = options.pop("q_tokens", 1)
    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda()
    keys, values = (x.cuda() for x in ordinary(2, 2, 1100, head_dim))
    keys[1, 0, 256:384, 3] = 1e30  # a raw block whose scores would drown every other
    keys[1, 0, 256:384, 3] *= 0
    keys[1, 0, 300, 3] = -1e30
    blocks = packed(keys[:, :, :1024], values[:, :, :1024])
    q = torch.randn(2, 2 * group, q_tokens, head_dim, device="cuda").bfloat16()
    q[1, :, :, 3] = q[1, :, :, 3].abs()  # that token gets no weight
    found = packed_attention(q, blocks, keys[:, :, 1024:], values[:, :, 1024:], **options)
    assert_close_to_fp32(found, q, keys, values, **options)


def test_200_random_shapes():
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for number in range(200):
        batch, heads, blocks_, tail = draw(1, 3), draw(1, 4), draw(1, 5), draw(1, 127)
        group, head_dim = (1, 2, 3, 4, 7, 8)[draw(0, 5)], (64, 128)[draw(0, 1)]
        q_tokens = min(draw(1, 8), 32 // group, tail)
        tokens = 128 * blocks_ + tail
        keys, values = (x.cuda() for x in ordinary(batch, heads, tokens, head_dim, number))
        blocks = packed(keys[:, :, : 128 * blocks_], values[:, :, : 128 * blocks_])
        q = torch.randn(batch, heads * group, q_tokens, head_dim, device="cuda").bfloat16()
        starts = torch.randint(0, tokens - q_tokens, (batch,), generator=generator).int().cuda()
        lengths = torch.randint(tokens - tail + q_tokens, tokens + 1, (batch,), generator=generator)
        options = {"starts": torch.minimum(starts, lengths.int().cuda() - q_tokens)}
        options["lengths"] = lengths.int().cuda()
        tails = keys[:, :, 128 * blocks_ :], values[:, :, 128 * blocks_ :]
        splits = (None, 1, draw(2, 40))[draw(0, 2)]
        found = packed_attention(q, blocks, *tails, splits=splits, **options)
        assert_close_to_fp32(found, q, keys, values, **options)


def test_graph_capture_and_other_stream():
    keys, values = (x.cuda() for x in ordinary(1, 2, 320, 128))
    blocks = packed(keys[:, :, :256], values[:, :, :256])
    q = torch.randn(1, 8, 1, 128, device="cuda").bfloat16()
    tails = keys[:, :, 256:], values[:, :, 256:]
    expected = packed_attention(q, blocks, *tails)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        found = packed_attention(q, blocks, *tails)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
