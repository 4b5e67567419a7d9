"""Models spread over processes and devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..harness import tiny_llama

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
