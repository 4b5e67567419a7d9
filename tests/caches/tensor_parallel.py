"""What each process of a tensor-parallel run does; started by ``test_several_devices.py``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.distributed import DistributedConfig

from hf_kvcodecs import BlockPool, GAACCache

from ..harness import assert_same_bits, assert_same_contents, generate, prompt
from ..kernels.references import references_for_kernels

PROMPT = 200


def report(rank: int, name: str, cache: GAACCache, dynamic: DynamicCache) -> None:
    """Compares the prompt's states: those behind it depend on how attention rounds."""
    for number, layer in enumerate(dynamic.layers):
        for found, expected in zip(cache.dense(number), (layer.keys, layer.values), strict=True):
            assert_same_bits(found[:, :, :PROMPT], expected[:, :, :PROMPT])
    heads = cache.layers[0].pair.shape(0)[1]
    print(f"rank {rank}: {name}: {heads} heads, factor {cache.memory().factor:.2f}", flush=True)


def main(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=2)
    ).eval()
    device = model.device
    rank, config = dist.get_rank(), model.config
    ids = prompt(PROMPT).to(device)
    dynamic = DynamicCache(config=config)
    expected = generate(model, ids, dynamic, max_new_tokens=12)
    heads = dynamic.layers[0].keys.shape[1]
    assert heads == config.num_key_value_heads // 2, f"{heads} heads: not spread"
    for name, cache in {
        "plain": GAACCache(backend="torch"),
        "by config": GAACCache(config),
    }.items():
        found = generate(model, ids, cache, max_new_tokens=12)
        if name == "plain" or device.type == "cpu":  # the same attention
            assert torch.equal(found, expected), name
            assert_same_contents(cache, dynamic)
        report(rank, name, cache, dynamic)
    if device.type == "cpu":
        references_for_kernels()
    pool = BlockPool(config, tokens=2000, kv_heads=heads, device=device)
    cache = GAACCache(pool=pool, max_tokens=300)
    generate(model, ids, cache, max_new_tokens=12)
    report(rank, "pooled", cache, dynamic)
    if device.type == "cuda":
        cache = GAACCache(config, max_tokens=300)
        generate(model, ids, cache, max_new_tokens=12)
        report(rank, "captured", cache, dynamic)
    everyone = [torch.empty_like(expected) for _ in range(2)]
    dist.all_gather(everyone, expected)
    assert torch.equal(*everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
