"""The same bits and tokens on a GPU in the portable torch path: heads and blocks that no kernel
takes. ``tests/caches/test_fused_pair.py`` has those that one does."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import GAACCache
from hf_kvcodecs.codecs import codec_for
from hf_kvcodecs.codecs.words import WORD_DTYPES

from .harness import (
    EXACT_DTYPES,
    assert_same_bits,
    assert_same_contents,
    dtype_id,
    filled_pair,
    forward,
    generate,
    prompt,
    tiny_llama,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=dtype_id)
def test_packed_bytes_are_those_of_the_cpu(dtype):
    bits = torch.randint(0, 256, (3 * 2 * 2 * 128 * 10 * dtype.itemsize,)).to(torch.uint8)
    normal = torch.randn(2, 2, 3, 128, 10).to(dtype).view(WORD_DTYPES[dtype])
    for words in (bits.view(WORD_DTYPES[dtype]).view(2, 2, 3, 128, 10), normal):
        codec = codec_for(dtype)
        here, there = codec.encode(words), codec.encode(words.cuda())
        for group in ("planes", "pools", "counts"):
            for name, tensor in getattr(here, group).items():
                assert_same_bits(getattr(there, group)[name].cpu(), tensor)
        tail = torch.zeros(2, 2, 5, 10, dtype=words.dtype, device="cuda")
        out = codec.decode(there, tail)
        found = out[:, :, :384].unflatten(2, (3, 128)).cpu()
        assert_same_bits(found, words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate(dtype, attention):
    model = tiny_llama(dtype).cuda()
    model.set_attn_implementation(attention)
    padded = torch.nn.functional.pad(prompt(40, 2), (9, 0))
    for ids, options in ((prompt(33, 3), {}), (padded, {}), (prompt(20, 2), {"num_beams": 4})):
        caches = GAACCache(block_tokens=16), DynamicCache()
        mine, theirs = (generate(model, ids.cuda(), cache, **options) for cache in caches)
        assert torch.equal(mine, theirs)
        assert_same_contents(*caches)


def test_crop_batch_operations_and_files(tmp_path):
    model = tiny_llama(torch.bfloat16).cuda()
    packed, dynamic = filled_pair(model, prompt(61, 2).cuda(), block_tokens=16)
    for cache in (packed, dynamic):
        cache.crop(-20)
        cache.reorder_cache(torch.tensor([1, 0]))  # on the CPU, as some callers have it
        cache.batch_repeat_interleave(2)
        forward(model, prompt(30, 4).cuda(), cache)
    assert_same_contents(packed, dynamic)
    packed.save(tmp_path / "cache")
    assert_same_contents(GAACCache.load(tmp_path / "cache", device="cuda"), dynamic)
    packed.layers[0].offload()
    assert packed.layers[0].device.type == "cpu"
    packed.layers[0].prefetch()
    assert_same_contents(packed, dynamic)
