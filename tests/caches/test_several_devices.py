"""Models spread over processes and devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_kvcodecs import BlockPool, CacheMisuseError, GAACCache

from ..harness import assert_same_bits, assert_same_contents, forward, generate, prompt, tiny_llama

ROOT = Path(__file__).parents[2]


def run_tensor_parallel(folder: Path, **environment: str) -> str:
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=102,
    )  # fmt: skip
    model.save_pretrained(folder)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "tests.caches.tensor_parallel", str(folder),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.compat
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_tensor_parallel_on_cpus(tmp_path):
    """Two processes, each with half of the heads: the tokens and the bits of DynamicCache."""
    out = run_tensor_parallel(tmp_path, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    for rank in (0, 1):
        for name in ("plain", "by config", "pooled"):
            assert f"rank {rank}: {name}: 1 heads" in out


needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, {torch.cuda.device_count()} here"
)


@pytest.mark.gpu
@needs_two_gpus
def test_tensor_parallel_on_gpus(tmp_path):
    out = run_tensor_parallel(tmp_path)
    for rank in (0, 1):
        for name in ("plain", "by config", "pooled", "captured"):
            assert f"rank {rank}: {name}: 1 heads" in out


def spread(folder: Path, places: dict[str, object], **options: object):
    """A tiny model whose parts are on ``places``."""
    tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    ).save_pretrained(folder)  # fmt: skip
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
             "model.rotary_emb", "lm_head")  # fmt: skip
    first = next(iter(places.values()))
    device_map = {name: places.get(name, first) for name in names}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device_map, **options
    ).eval()


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_weights_on_disk(tmp_path, options):
    """accelerate's hooks around each module: it puts weights in place, and takes them away."""
    pytest.importorskip("accelerate")
    places = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = spread(tmp_path, places, offload_folder=tmp_path / "offloaded")
    assert next(model.model.layers[1].parameters()).device.type == "meta"
    packed, dynamic = GAACCache(backend="torch"), DynamicCache()
    ids = prompt(150, 2)
    found, expected = (
        generate(model, ids, cache, max_new_tokens=5, **options) for cache in (packed, dynamic)
    )
    assert torch.equal(found, expected)
    assert_same_contents(packed, dynamic)
    assert packed.layers[1].pair.sealed_tokens == 128


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("kind", ["grown", "offloaded", "captured"])
def test_layers_on_two_gpus(tmp_path, kind):
    model = spread(tmp_path, {"model.layers.0": 0, "model.layers.1": 1, "lm_head": 1})
    options = {"grown": {}, "offloaded": {"offload": "cpu"}, "captured": {"max_tokens": 400}}
    packed, dynamic = GAACCache(model.config, **options[kind]), DynamicCache()
    ids = prompt(300, 2).cuda()
    for cache in (packed, dynamic):
        forward(model, ids, cache)
    assert_same_contents(packed, dynamic)
    assert [layer.device.index for layer in packed.layers] == [0, 1]
    for device in ("cpu", "cuda:0", "cuda:1"):
        for cache in (packed, dynamic):
            rows = torch.tensor([1, 0])
            cache.reorder_cache(rows.to(device) if cache is packed else rows)
        assert_same_contents(packed, dynamic)
    for _ in range(3):
        found, expected = (forward(model, ids[:, :1], cache) for cache in (packed, dynamic))
        similar = torch.nn.functional.cosine_similarity(found.float(), expected.float(), -1)
        assert similar.min() > 0.99


@pytest.mark.gpu
@needs_two_gpus
def test_a_pool_is_on_one_gpu(tmp_path):
    model = spread(tmp_path, {"model.layers.0": 0, "model.layers.1": 1, "lm_head": 1})
    pool = BlockPool(model.config, tokens=2000, device="cuda:0")
    with pytest.raises(CacheMisuseError, match="cuda:1"):
        forward(model, prompt(20).cuda(), GAACCache(pool=pool))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", ["grown", "offloaded", "pooled"])
def test_streams_and_indices_elsewhere(kind):
    """On a stream that is not the default one, with rows chosen by indices on the host."""
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    ).cuda()  # fmt: skip
    pool = BlockPool(model.config, tokens=4000, rows=4, device="cuda")
    stream = torch.cuda.Stream()
    for attempt in range(4):  # memory of one stream's cache goes to another's
        options = {"grown": {}, "offloaded": {"offload": "cpu"}, "pooled": {"pool": pool}}
        packed, dynamic = GAACCache(**options[kind]), DynamicCache()
        ids = prompt(500, 2, seed=attempt).cuda()
        torch.cuda.synchronize()
        side = stream if attempt % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(side):
            for cache in (packed, dynamic):
                forward(model, ids, cache)
                cache.reorder_cache(torch.tensor([1, 1]))
            for layer, other in zip(packed.layers, dynamic.layers, strict=True):
                keys, values = layer.pair.dense()
                assert_same_bits(keys, other.keys)
                assert_same_bits(values, other.values)
        del packed, layer
