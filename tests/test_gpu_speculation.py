"""Drafts on a GPU: graphs, staged and packed layers, attention without masks; the same tokens."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import SpeculativeKVCache, draft_verify
from hf_kvcodecs.caches import draft
from hf_kvcodecs.caches.attention_view import SDPACall
from hf_kvcodecs.caches.split_attention import split_attention
from hf_kvcodecs.generation.inputs import RowInputs
from hf_kvcodecs.kernels.ragged_attention import (
    PackedSegments,
    ragged_attention,
    ragged_attention_works,
)
from hf_kvcodecs.kernels.ragged_attention.reference import ragged_attention_reference
from hf_kvcodecs.store.packed import PackedStore, RegisterSegment

from .caches.test_split_attention import case
from .harness import assert_same_bits, forward, generate, prompt, tiny_llama
from .kernels.test_ragged_attention import inputs, packed_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

OPTIONS = [
    {"compressor": "snapkv", "keep": 0.5},
    {"compressor": "snapkv", "keep": 0.5, "graphs": False, "staging_bytes": 1 << 30},
    {"compressor": "kvzip", "keep": 0.5, "full_codec": "gaac"},
    {"compressor": "kvzip", "keep": 0.6, "bits": 8, "full": "disk", "hold_decoded": True},
    {"compressor": "reselect+kivi", "keep": 0.6, "bits": 8},
    {"compressor": "kvzip", "keep": 0.6, "bits": 8, "compile_drafts": True},
]


@pytest.fixture(autouse=True)
def deterministic_off():
    """Graphs and flash attention have no deterministic form; memory is poisoned still."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_tokens_in_fp32(options):
    model = tiny_llama().cuda()
    ids = prompt(300).cuda()
    plain = generate(model, ids, DynamicCache(), max_new_tokens=80)
    cache = SpeculativeKVCache(**options, draft_length=6, refresh_tokens=30)
    out = generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=80)
    assert torch.equal(out, plain)
    assert cache.report().rounds > 5
    if options.get("graphs") is None and options["compressor"] in ("snapkv", "kvzip"):
        assert cache.drafts_statically


def test_graphs_draft_what_eager_steps_draft():
    model = tiny_llama().cuda()
    ids = prompt(300).cuda()
    accepted = []
    for graphs in (False, True):
        cache = SpeculativeKVCache(
            compressor="snapkv", keep=0.5, draft_length=6, refresh_tokens=30, graphs=graphs
        )
        generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=80)
        accepted.append(cache.report().accepted_by_round)
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize("full", [{}, {"full_codec": "gaac"}], ids=["host", "packed"])
@pytest.mark.parametrize("staging_bytes", [None, 1 << 20, 1 << 30])
def test_the_exact_face_is_exact(full, staging_bytes):
    """bf16 heads of 64, long enough for sealed segments: every bit, after chunks and crops."""
    model = tiny_llama(torch.bfloat16, head_dim=64).cuda()
    cache = SpeculativeKVCache(compressor="knorm", staging_bytes=staging_bytes, **full)
    dynamic = DynamicCache()
    for seed, tokens in enumerate((1500, 700, 1, 3, 1100)):
        part = prompt(tokens, seed=seed).cuda()
        ours, theirs = forward(model, part, cache), forward(model, part, dynamic)
        assert (ours - theirs).float().abs().mean() < 0.05 * theirs.float().abs().mean()
        cache.crop(-1)
        dynamic.crop(-1)
    # Attention rounds by the kernel that was chosen, and so do the layers behind the first.
    for side in (0, 1):
        ours = cache.dense(0)[side]
        assert_same_bits(ours, (dynamic.layers[0].keys, dynamic.layers[0].values)[side].cpu())
    if full:
        assert isinstance(cache.faces.store, PackedStore)
        segments = cache.faces.store._sealed[0]
        assert all(isinstance(segment, RegisterSegment) for segment in segments)
    cache.begin_draft()
    forward(model, prompt(2).cuda(), cache)
    cache.end_draft()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [0, 50])
def test_attention_without_a_mask(dtype, padding):
    query, keys, values, mask = (
        part.cuda() for part in case(new=26, known=5000, heads=2, groups=4, padding=padding)
    )
    wide = [part.repeat(1, 1, 1, 2).to(dtype) for part in (query, keys, values)]
    out = split_attention(*wide, SDPACall(mask))
    assert out is not None
    exact = [part.double() for part in wide]
    exact[1:] = [part.repeat_interleave(4, 1) for part in exact[1:]]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, mask)
    error = (out.double() - expected).abs().max()
    plain = [part.repeat_interleave(4, 1) if i else part for i, part in enumerate(wide)]
    peer = torch.nn.functional.scaled_dot_product_attention(*plain, mask).double()
    assert error <= 2 * (peer - expected).abs().max() + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ragged_attention(dtype, head_dim):
    assert ragged_attention_works(torch.device("cuda", 0), dtype, head_dim)
    for counts in ([5000, 13, 900], [9000] * 8):
        given = inputs(counts, group=4, head_dim=head_dim, dtype=dtype)
        given = [part.cuda() for part in given]
        out = ragged_attention(*given, head_dim**-0.5).float()
        expected = ragged_attention_reference(*given, head_dim**-0.5)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "bits"), [(64, 4), (128, 4), (128, 2), (128, 8), (256, 4)])
def test_ragged_attention_over_quantised_tokens(dtype, head_dim, bits):
    counts = [5024, 0, 9600]
    given = [part.cuda() for part in inputs([40, 13, 900], group=4, head_dim=head_dim, dtype=dtype)]
    assert ragged_attention_works(torch.device("cuda", 0), dtype, head_dim, bits)
    segments, _ = packed_segments(counts, bits, head_dim, dtype)
    segments = PackedSegments(**{
        field.name: getattr(segments, field.name).cuda() for field in fields(PackedSegments)
    })  # fmt: skip
    scale = head_dim**-0.5
    out = ragged_attention(*given, scale, segments).float()
    expected = ragged_attention_reference(*given, scale, segments)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("hold_decoded", [False, True])
def test_quantised_drafts_are_read_by_the_kernel(hold_decoded, monkeypatch):
    """They are decoded as they are read, or were before; nearly every draft is accepted."""
    model = tiny_llama(torch.bfloat16, head_dim=64).cuda()
    ids, given = prompt(3000).cuda(), []

    def noted(*arguments):
        given.append(arguments[-1])
        return ragged_attention(*arguments)

    monkeypatch.setattr(draft, "ragged_attention", noted)
    cache = SpeculativeKVCache(compressor="kivi", bits=8, draft_length=6, hold_decoded=hold_decoded)
    generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=40)
    assert given
    assert all((packed is None) == hold_decoded for packed in given)
    assert cache.report().mean_accepted > 3


@pytest.mark.parametrize("padding", [0, 5])
def test_the_host_runs_ahead_of_verifications(monkeypatch, padding):
    """Behind the first one, which looks at the mask, no forward waits for the device."""
    model = tiny_llama(torch.bfloat16, head_dim=64).cuda()
    ids, plain, ahead = prompt(3000).cuda(), RowInputs.forward, []
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0

    def forward(self, new, *args):
        if not (self.cache.faces.verifying and self.cache.faces.starts and new.shape[1] > 1):
            return plain(self, new, *args)
        ahead.append(self.cache.faces.starts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, new, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(RowInputs, "forward", forward)
    cache = SpeculativeKVCache(
        compressor="snapkv", keep=0.5, full_codec="gaac", draft_length="auto"
    )
    generate(
        model, ids, cache, attention_mask=mask, custom_generate=draft_verify, max_new_tokens=60
    )
    assert ahead
    assert set(ahead[0].values()) == {padding}


def test_staging_takes_two_layers_and_no_more():
    model = tiny_llama(torch.bfloat16, num_hidden_layers=8).cuda()
    cache = SpeculativeKVCache(compressor="snapkv", keep=0.2)
    generate(model, prompt(3000).cuda(), cache, custom_generate=draft_verify)
    report = cache.report()
    assert report.staging_bytes <= 2.3 * report.dense_bytes / 8
    assert report.bytes_moved >= report.rounds * report.dense_bytes * 0.9
