"""The register word order, as its reference writes and reads it."""

from __future__ import annotations

import pytest
import torch

from hf_kvcodecs.errors import KVCodecsError
from hf_kvcodecs.kernels.register_blocks import RegisterBlocks, slot_words
from hf_kvcodecs.kernels.register_reference import (
    element_index,
    register_pack_reference,
    register_unpack_reference,
)

from .register_cases import adversarial, ordinary, same_bits


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_number_has_one_place(head_dim):
    for kind in range(2):
        index = element_index(head_dim, kind).flatten()
        assert torch.equal(index.sort().values, torch.arange(64 * head_dim))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_round_trip_in_two_goes(head_dim):
    keys, values = ordinary(1, 2, 256, head_dim)
    blocks = RegisterBlocks.allocate(1, 2, head_dim, 2, "cpu")
    register_pack_reference(keys[:, :, :128], values[:, :, :128], blocks)
    register_pack_reference(keys[:, :, 128:], values[:, :, 128:], blocks)
    assert blocks.blocks == 2
    assert int(blocks.table.min()) >= 0
    found = register_unpack_reference(blocks)
    assert same_bits(found[0], keys)
    assert same_bits(found[1], values)


RAW = ("every pattern", "one huge channel", "subnormals", "many escapes")


@pytest.mark.parametrize("name", adversarial(64))
def test_adversarial_blocks(name):
    keys, values = adversarial(64)[name]
    blocks = RegisterBlocks.allocate(1, 1, 64, 1, "cpu")
    register_pack_reference(keys, values, blocks)
    blocks.check()
    found = register_unpack_reference(blocks)
    assert same_bits(found[0], keys)
    assert same_bits(found[1], values)
    raw = int(blocks.table[0, 0, 0]) < 0
    assert raw == (name in RAW)


def test_bits_of_normal_numbers():
    keys, values = (torch.randn(1, 2, 256, 128).bfloat16() for _ in range(2))
    blocks = RegisterBlocks.allocate(1, 2, 128, 2, "cpu")
    register_pack_reference(keys, values, blocks)
    bits = blocks.nbytes * 8 / (2 * keys.numel())
    assert bits < 11.5
    fixed = slot_words(128) * 32 / (2 * 128 * 128)
    assert fixed < 11.2


def test_other_widths_stay_raw():
    keys, values = (torch.randn(1, 2, 128, 80).bfloat16() for _ in range(2))
    blocks = RegisterBlocks.allocate(1, 2, 80, 1, "cpu")
    register_pack_reference(keys, values, blocks)
    assert not blocks.packable
    assert int(blocks.table.max()) < 0
    assert same_bits(register_unpack_reference(blocks)[0], keys)


def test_pool_too_large():
    with pytest.raises(ValueError, match="pool_words"):
        RegisterBlocks.allocate(1, 1, 64, 1, "cpu", pool_words=1 << 30)


def test_no_room_is_not_silent():
    keys, values = adversarial(64)["every pattern"]
    keys, values = keys.repeat(1, 1, 2, 1), values.repeat(1, 1, 2, 1)
    blocks = RegisterBlocks.allocate(1, 1, 64, 2, "cpu", raw_slots=1)
    register_pack_reference(keys, values, blocks)
    with pytest.raises(KVCodecsError, match=r"1 of 2 blocks .* raw_slots"):
        blocks.check()
