"""Drafts on a compressed cache of the real default model: the tokens of plain generate."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import ChunkReuseCache, ChunkStore, SpeculativeKVCache, draft_verify

from ..harness import forward, generate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import texts

FEW = [
    {"compressor": "kvzip", "keep": 0.3, "draft_length": 12},
    {"compressor": "reselect+kivi", "keep": 0.4, "bits": 4, "full_codec": "gaac"},
    {"compressor": "snapkv", "keep": 0.2, "draft_length": "auto", "graphs": True},
]
ALL = [
    *FEW,
    *({"compressor": name, "keep": 0.2} for name in ("streaming_llm", "knorm", "tova", "online")),
    {"compressor": "expected_attention", "keep": 0.2},
    *({"compressor": "kivi", "bits": bits} for bits in (8, 4, 3, 2)),
    {"compressor": "rotate", "bits": 4},
    {"compressor": "snapkv+rotate", "keep": 0.5, "bits": 4},
]


def check(load, options, prompts, new_tokens):
    model, tokenizer = load(torch.float32)
    accepted = 0
    for text in prompts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        kept = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": new_tokens,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        plain = generate(model, ids, DynamicCache(), **kept)
        cache = SpeculativeKVCache(**options)
        out = generate(model, ids, cache, custom_generate=draft_verify, **kept)
        assert torch.equal(out.sequences, plain.sequences)
        ours, theirs = (torch.cat(found.logits).double() for found in (out, plain))
        divergence = torch.nn.functional.kl_div(
            ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        assert divergence.max() < 1e-6  # nats, at every position
        accepted += cache.report().accepted
    assert accepted > 0


@pytest.mark.parametrize("options", FEW, ids=lambda options: options["compressor"])
def test_the_same_tokens(smollm2, options):
    tokenizer = smollm2(torch.float32)[1]
    check(smollm2, options, texts.real_prompts(tokenizer, 20)[2:4], 24)


@pytest.mark.slow
@pytest.mark.parametrize("options", ALL, ids=str)
def test_the_same_tokens_from_20_prompts(smollm2, options):
    tokenizer = smollm2(torch.float32)[1]
    check(smollm2, options, texts.real_prompts(tokenizer, 20), 128)


def test_bf16_parts_only_where_two_logits_are_within_rounding(smollm2):
    model, tokenizer = smollm2(torch.bfloat16)
    ids = tokenizer(
        texts.real_prompts(tokenizer, 20)[2], add_special_tokens=False, return_tensors="pt"
    ).input_ids
    kept = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 32,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = generate(model, ids, DynamicCache(), **kept)
    cache = SpeculativeKVCache(compressor="kivi", bits=8, draft_length=8)
    out = generate(model, ids, cache, custom_generate=draft_verify, **kept)
    shared = min(out.sequences.shape[1], plain.sequences.shape[1])
    differing = (out.sequences[0, :shared] != plain.sequences[0, :shared]).nonzero().flatten()
    if len(differing):
        logits = plain.logits[int(differing[0]) - ids.shape[1]][0].float()
        best = logits.topk(2).values
        assert best[0] - best[1] <= 2 * best[0].abs() * 2**-8


def test_verified_reuse_of_a_moved_document(smollm2):
    """Most early tokens hold, and the text is that of full prefill, bit for bit in its prompt."""
    model, tokenizer = smollm2(torch.float32)
    document = tokenizer(inspect.getsource(argparse)[20_000:22_500], return_tensors="pt").input_ids
    first, second, question = (
        tokenizer(text, return_tensors="pt").input_ids
        for text in ("# A file.\n", "Here is a listing of a Python file.\n", "\n# In short, this")
    )
    store = ChunkStore()
    seen = torch.cat([first, document, question], 1)
    forward(model, seen, ChunkReuseCache(model, store), logits_to_keep=1)
    ids = torch.cat([second, document, question], 1)
    kept = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    plain = generate(model, ids, DynamicCache(), **kept)
    early: list[torch.Tensor] = []
    cache = ChunkReuseCache(model, store, verify=True, on_provisional=early.append)
    out = generate(model, ids, cache, custom_generate=draft_verify, **kept)
    assert torch.equal(out, plain)
    report = cache.report()
    assert report.moved_tokens > 400
    assert report.provisional_tokens == early[-1].shape[1] == 16
    assert report.accepted_tokens > 4
    assert report.provisional_seconds < report.verified_seconds
