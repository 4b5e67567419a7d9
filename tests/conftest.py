"""Fixtures for every test: poisoned memory, tiny models, the real default model."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or deterministic CUDA refuses matmul
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_kvcodecs.integrations.default_model import default_model

from .harness import tiny_llama

logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory holds NaN and the largest integers instead of whatever was there: nothing may
    depend on it."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request):
    """Threads only cost on tiny tensors, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    if "smollm2" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_models():
    """Small random Llamas with sharp logits, by dtype."""
    return {dtype: tiny_llama(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}


@pytest.fixture(scope="session")
def smollm2():
    """A function from dtype to (SmolLM2-135M-Instruct, tokenizer)."""
    folder = default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models: dict[torch.dtype, torch.nn.Module] = {}

    def load(dtype: torch.dtype = torch.bfloat16):
        if dtype not in models:
            models[dtype] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return models[dtype], tokenizer

    return load
