"""The fused and the compiled unpacking against the readable reference, and dispatch between
them."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_kvcodecs.codecs.words import to_words
from hf_kvcodecs.kernels import dispatch
from hf_kvcodecs.kernels.exponent_pack import exponent_pack
from hf_kvcodecs.kernels.exponent_unpack import apply_patches, block_view, exponent_unpack
from hf_kvcodecs.kernels.exponent_unpack.reference import exponent_unpack_reference
from hf_kvcodecs.layouts import EXPONENT_LAYOUTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 128])
@pytest.mark.parametrize("backend", ["torch", "compile"])
@pytest.mark.parametrize("name", DTYPES)
def test_fused_equals_reference(name, backend, head_dim):
    layout = EXPONENT_LAYOUTS[name]
    for blocks, batch, heads in ((1, 1, 1), (3, 2, 2), (5, 1, 3)):
        values = torch.randn(batch, heads, blocks, 32, head_dim) * torch.exp2(
            torch.randn(head_dim) * 3
        )
        values[torch.rand(values.shape) < 0.01] = 0.0
        packed = exponent_pack(to_words(values.to(DTYPES[name])), layout)
        for tail_tokens in (0, 1, 7):
            tail = torch.randint(0, 99, (batch, heads, tail_tokens, head_dim)).to(torch.int16)
            expected = torch.cat([tail.new_zeros(batch, heads, blocks * 32, head_dim), tail], dim=2)
            exponent_unpack_reference(packed, layout, block_view(expected, blocks, 32))
            apply_patches(packed, expected, 32)
            assert torch.equal(exponent_unpack(packed, layout, tail, backend), expected)


def test_packing_in_chunks_equals_packing_at_once(monkeypatch):
    words = to_words(torch.randn(2, 3, 7, 32, 8).bfloat16())
    layout = EXPONENT_LAYOUTS["bf16"]
    whole = exponent_pack(words, layout)
    monkeypatch.setattr(
        "hf_kvcodecs.kernels.exponent_pack.CHUNK_ELEMENTS", words[:, :, 0].numel() * 2
    )
    pieces = exponent_pack(words, layout)
    for group in ("planes", "pools", "counts"):
        for name, tensor in getattr(whole, group).items():
            assert torch.equal(tensor, getattr(pieces, group)[name]), name


def test_auto_compiles_only_large_work_on_a_cpu():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert dispatch._compile_works, "an earlier test failed to compile"
    assert dispatch.use_compiled("auto", cpu, dispatch.COMPILE_FROM_ELEMENTS)
    assert not dispatch.use_compiled("auto", cpu, dispatch.COMPILE_FROM_ELEMENTS - 1)
    assert not dispatch.use_compiled("auto", cuda, 1 << 30)
    assert not dispatch.use_compiled("torch", cpu, 1 << 30)
    assert dispatch.use_compiled("compile", cpu, 1)
    assert not dispatch.use_compiled("compile", cuda, 1 << 30)
    with pytest.raises(ValueError, match="backend: expected one of"):
        dispatch.check_backend("triton2")


def test_a_machine_without_a_compiler_falls_back_and_says_so_once(monkeypatch, caplog):
    def no_compiler(*_):
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(dispatch, "_compile", lambda function: no_compiler)
    monkeypatch.setattr(dispatch, "_compile_works", True)
    monkeypatch.setattr(dispatch, "_noticed", set())
    layout = EXPONENT_LAYOUTS["bf16"]
    words = to_words(torch.randn(1, 1, 2, 32, 8).bfloat16())
    tail = torch.zeros(1, 1, 2, 8, dtype=torch.int16)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = exponent_unpack(exponent_pack(words, layout), layout, tail, "compile")
    assert torch.equal(block_view(out, 2, 32), words)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler here" in caplog.text
