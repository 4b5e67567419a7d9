"""Ragged attention in Triton's interpreter, against its reference."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hf_kvcodecs.compressors.quantise import KIVI
from hf_kvcodecs.kernels.ragged_attention import (
    PackedSegments,
    ragged_attention,
    unsupported_reason,
)
from hf_kvcodecs.kernels.ragged_attention.reference import decode, ragged_attention_reference

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 runs these on a CPU"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def inputs(counts, capacity=40, group=3, head_dim=64, cursor=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    starts = [sum(counts[:head]) + head * capacity for head in range(len(counts))]
    rows = sum(counts) + len(counts) * capacity
    q = torch.randn(len(counts), group, head_dim, generator=generator).to(dtype)
    keys, values = (torch.randn(rows, head_dim, generator=generator).to(dtype) for _ in range(2))
    # Rows behind a tail's newest are never read.
    for start, count in zip(starts, counts, strict=True):
        keys[start + count + cursor + 1 : start + count + capacity] = float("nan")
        values[start + count + cursor + 1 : start + count + capacity] = float("nan")
    return q, keys, values, torch.tensor(starts), torch.tensor(counts), torch.tensor([cursor])


@pytest.mark.parametrize(
    "options",
    [
        {"counts": [200, 3, 131]},
        {"counts": [0, 700], "cursor": 0, "group": 1},
        {"counts": [64, 64], "cursor": 39, "group": 16, "head_dim": 128},
        {"counts": [90], "head_dim": 256, "group": 4},
        {"counts": [200, 60], "dtype": torch.float16},
    ],
    ids=str,
)
def test_against_the_reference(options):
    given = inputs(**options)
    out = ragged_attention(*given, 0.11)
    expected = ragged_attention_reference(*given, 0.11)
    assert out.dtype == given[0].dtype
    tolerance = 1e-5 if out.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def packed_segments(counts, bits, head_dim, dtype):
    """Segments of so many random tokens, and what the quantiser decodes them to."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(head_dim, generator=generator).exp()
    keys, values = (
        (torch.randn(sum(counts), head_dim, generator=generator) * spread).to(dtype)
        for _ in range(2)
    )
    quantiser = KIVI(bits=bits)
    packed = quantiser.encode(keys, values)
    parts = {
        f"{kind}_{name}": getattr(part, name).squeeze(-1)
        for kind, part in zip(("key", "value"), packed, strict=True)
        for name in ("words", "scale", "minimum")
    }
    starts = [sum(counts[:head]) for head in range(len(counts))]
    segments = PackedSegments(**parts, starts=torch.tensor(starts), counts=torch.tensor(counts))
    return segments, quantiser.decode(*packed, dtype, (head_dim, head_dim))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("packed", "options"),
    [
        ([160, 0, 672], {"counts": [20, 3, 131]}),
        ([96, 2048], {"counts": [0, 0], "cursor": 0, "group": 4, "head_dim": 128}),
        ([320], {"counts": [40], "head_dim": 256, "dtype": torch.float16}),
    ],
    ids=str,
)
def test_quantised_tokens(packed, options, bits):
    given = inputs(**options)
    q = given[0]
    segments, decoded = packed_segments(packed, bits, q.shape[2], q.dtype)
    assert all(map(torch.equal, decode(segments, q.dtype), decoded))
    out = ragged_attention(*given, 0.11, segments)
    expected = ragged_attention_reference(*given, 0.11, segments)
    tolerance = 1e-5 if out.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_quantised_tokens_of_other_forms_are_refused():
    given = inputs([10])
    segments = packed_segments([64], 3, 64, torch.float32)[0]
    with pytest.raises(ValueError, match="codes of 3 bits"):
        ragged_attention(*given, 1.0, segments)
    segments = packed_segments([64], 4, 64, torch.float32)[0]
    with pytest.raises(ValueError, match="dtypes"):
        ragged_attention(*given, 1.0, replace(segments, counts=segments.counts.int()))
    segments = packed_segments([64], 4, 128, torch.float32)[0]
    with pytest.raises(ValueError, match="quantised tokens of shapes"):
        ragged_attention(*given, 1.0, segments)


def test_what_it_refuses():
    q, keys, values, *rest = inputs([10])
    assert unsupported_reason(q, keys, values) is None
    assert "query heads" in unsupported_reason(q.repeat(1, 6, 1), keys, values)
    assert "dtypes" in unsupported_reason(q.half(), keys, values)
    with pytest.raises(ValueError, match="cannot take keys"):
        ragged_attention(q[..., :48], keys[:, :48], values[:, :48], *rest, 1.0)
    with pytest.raises(ValueError, match="expected contiguous"):
        ragged_attention(q, keys.repeat(1, 2)[:, :64], values, *rest, 1.0)
