"""The exact KV cache packed without loss, so that fewer bytes cross the link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..codecs import TensorCodec, codec_for
from ..codecs.words import from_words, to_words
from ..kernels.dispatch import fused_device
from ..kernels.exponent_pack import register_pack
from ..kernels.exponent_unpack import register_unpack
from ..kernels.register_blocks import BLOCK_TOKENS, HEAD_DIMS, RegisterBlocks
from ..kernels.self_test import kernels_fail
from ..layouts import PackedBlocks
from .full import FullStore, HostStore, host_empty, wait_for_device

SEAL_TOKENS = 1024  # generated tokens are packed so many at a time
KEEP_TOKENS = 128  # the newest stay raw: taking back drafts opens no block
SEGMENT_BLOCKS = 128  # of one segment at most: what crosses the link and is unpacked at a time


class Segment(ABC):
    """A run of sealed tokens, all rows and heads, in host memory."""

    tokens: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that cross the link."""

    @abstractmethod
    def unpack(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values ``[batch, kv_heads, tokens, head_dim]`` on ``device``, enqueued on
        its current stream."""

    def unpack_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The same, into tensors of that shape and any strides."""
        for target, source in zip((keys, values), self.unpack(keys.device), strict=True):
            target.copy_(source)


@dataclass(frozen=True, slots=True)
class PlainSegment(Segment):
    """Blocks by the codecs that every device reads; keys' rows before the values'."""

    parts: tuple[tuple[TensorCodec, PackedBlocks, int], ...]  # codec, blocks, head_dim
    tokens: int

    @staticmethod
    def pack(keys: torch.Tensor, values: torch.Tensor) -> PlainSegment:
        """Seals whole blocks, on their device."""
        together = keys.shape == values.shape and keys.dtype == values.dtype
        parts = []
        for states in (torch.cat([keys, values]),) if together else (keys, values):
            codec = codec_for(states.dtype, block_tokens=BLOCK_TOKENS)
            words = to_words(states).unflatten(2, (-1, BLOCK_TOKENS))
            parts.append((codec, codec.encode(words).map(_to_host), states.shape[3]))
        return PlainSegment(tuple(parts), keys.shape[2])

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for _, packed, _ in self.parts)

    def unpack(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device.type == "cpu":
            wait_for_device()
        out = []
        for codec, packed, head_dim in self.parts:
            moved = packed.map(lambda tensor: tensor.to(device, non_blocking=True))
            batch, heads, _ = packed.lead_shape
            tail = torch.empty((batch, heads, 0, head_dim), dtype=codec.word_dtype, device=device)
            out.append(from_words(codec.decode(moved, tail), codec.dtype))
        keys, values = out[0].chunk(2) if len(out) == 1 else out
        return keys, values


@dataclass(frozen=True, slots=True)
class RegisterSegment(Segment):
    """bf16 blocks that a GPU's kernels pack and unpack; see
    :mod:`hf_kvcodecs.kernels.register_blocks`."""

    blocks: RegisterBlocks  # what crosses the link are views of `memory`
    memory: torch.Tensor
    device: torch.device
    tokens: int

    @staticmethod
    def pack(keys: torch.Tensor, values: torch.Tensor) -> RegisterSegment:
        """Seals whole blocks on the GPU and moves them to the host."""
        batch, heads, tokens, head_dim = keys.shape
        count = tokens // BLOCK_TOKENS
        made = RegisterBlocks.allocate(batch, heads, head_dim, count, keys.device)
        register_pack(keys, values, made)
        pool, raw, lost = made.cursors.tolist()
        if lost:  # unusual numbers: room for all of them raw
            made = RegisterBlocks.allocate(
                batch, heads, head_dim, count, keys.device, raw_slots=batch * heads * count
            )
            register_pack(keys, values, made)
            made.check()
            pool, raw, _ = made.cursors.tolist()
        used = replace(
            made,
            pool=made.pool[: max(min(pool, made.pool.numel()), 2)],
            raw=made.raw[: max(min(raw, made.raw.shape[0]), 1)],
            # Attention alone reads these two.
            raw_list=made.raw_list.new_zeros((batch, heads, 0), device="cpu"),
            raw_count=made.raw_count.new_zeros((batch, heads), device="cpu"),
            cursors=made.cursors.cpu(),
        )
        sizes = [_padded_bytes(getattr(used, name)) for name in _MOVED]
        memory = host_empty((sum(sizes),), torch.uint8)
        kept = _views(used, memory)
        for name in _MOVED:
            getattr(kept, name).copy_(getattr(used, name), non_blocking=True)
        return RegisterSegment(kept, memory, keys.device, tokens)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def _moved(self, device: torch.device) -> RegisterBlocks:
        """The blocks on the device, in one transfer."""
        return _views(self.blocks, self.memory.to(device, non_blocking=True))

    def unpack(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        there = device if device.type == "cuda" else self.device
        keys, values = register_unpack(self._moved(there))
        return keys.to(device), values.to(device)

    def unpack_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.device.type != "cuda":
            super().unpack_into(keys, values)
            return
        register_unpack(self._moved(keys.device), into=(keys, values))


_MOVED = ("words", "pool", "raw", "table")


def _padded_bytes(tensor: torch.Tensor) -> int:
    """Its bytes, so that what lies behind begins where words of any size may."""
    return -(-tensor.nbytes // 16) * 16


def _views(blocks: RegisterBlocks, memory: torch.Tensor) -> RegisterBlocks:
    """``blocks`` with what crosses the link in ``memory``, uint8, one behind the other."""
    start = 0
    views: Any = {}
    for name in _MOVED:
        like = getattr(blocks, name)
        views[name] = memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
        start += _padded_bytes(like)
    return replace(blocks, **views)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in (pinned) host memory, enqueued on the current stream."""
    return host_empty(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)


def seal(keys: torch.Tensor, values: torch.Tensor) -> Segment:
    """Whole blocks in the form that their device reads fastest."""
    if (
        keys.dtype == values.dtype == torch.bfloat16
        and keys.shape == values.shape
        and keys.shape[3] in HEAD_DIMS
        and fused_device(keys.device)
        and kernels_fail(keys.device, keys.shape[3]) is None
    ):
        return RegisterSegment.pack(keys, values)
    return PlainSegment.pack(keys, values)


class PackedStore(FullStore):
    """Sealed segments in host memory and a raw tail behind them, bit for bit what was appended.

    bf16 takes about 0.71 of its bytes, fp16 0.89, fp32 0.85. A prompt is packed on its device as it
    arrives, generated tokens about a thousand at a time.
    """

    def __init__(self) -> None:
        self._sealed: dict[int, list[Segment]] = {}
        # Never grows: it is sealed before it is full, whatever a draft adds.
        self._tail = HostStore(spare_tokens=SEAL_TOKENS + 2 * KEEP_TOKENS)
        self._devices: dict[int, torch.device] = {}

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._devices[layer_idx] = keys.device
        size = (keys.shape[2] - KEEP_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        if self._tail.tokens(layer_idx) == 0 and size > 0:  # a prompt: straight from the states
            self._seal(layer_idx, keys[:, :, :size], values[:, :, :size])
            keys, values = keys[:, :, size:], values[:, :, size:]
        self._tail.append(layer_idx, keys, values)
        if self._tail.tokens(layer_idx) >= SEAL_TOKENS + KEEP_TOKENS:
            self._seal_tail(layer_idx)

    def _seal(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        size = SEGMENT_BLOCKS * BLOCK_TOKENS
        self._sealed.setdefault(layer_idx, []).extend(
            seal(*part) for part in zip(keys.split(size, 2), values.split(size, 2), strict=True)
        )

    def _seal_tail(self, layer_idx: int) -> None:
        tokens = self._tail.tokens(layer_idx)
        size = (tokens - KEEP_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        keys, values = (part.to(self._devices[layer_idx]) for part in self._tail.read(layer_idx))
        self._seal(layer_idx, keys[:, :, :size], values[:, :, :size])
        self._tail.replace(layer_idx, keys[:, :, size:].clone(), values[:, :, size:].clone())

    def _sealed_tokens(self, layer_idx: int) -> int:
        return sum(segment.tokens for segment in self._sealed.get(layer_idx, ()))

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [s.unpack(torch.device("cpu")) for s in self._sealed.get(layer_idx, ())]
        parts.append(self._tail.read(layer_idx))
        keys, values = (torch.cat([part[side] for part in parts], dim=2) for side in (0, 1))
        return keys, values

    def copy_to(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        start = 0
        for segment in self._sealed.get(layer_idx, ()):
            stop = start + segment.tokens
            segment.unpack_into(*(part[start:stop].permute(1, 2, 0, 3) for part in (keys, values)))
            start = stop
        self._tail.copy_to(layer_idx, keys[start:], values[start:])
        return self.layer_nbytes(layer_idx)

    def tokens(self, layer_idx: int) -> int:
        return self._sealed_tokens(layer_idx) + self._tail.tokens(layer_idx)

    def like(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tail.like(layer_idx)

    def crop(self, layer_idx: int, tokens: int) -> None:
        sealed = self._sealed_tokens(layer_idx)
        if tokens >= sealed:
            self._tail.crop(layer_idx, tokens - sealed)
            return
        segments, opened = self._sealed[layer_idx], None
        while sealed > tokens:
            opened = segments.pop()
            sealed -= opened.tokens
        assert opened is not None
        dense = opened.unpack(torch.device("cpu"))
        keys, values = (part[:, :, : tokens - sealed] for part in dense)
        self._tail.replace(layer_idx, keys, values)

    def clear(self) -> None:
        wait_for_device()
        self._sealed.clear()
        self._tail.clear()

    def layer_nbytes(self, layer_idx: int) -> int:
        sealed = sum(segment.nbytes for segment in self._sealed.get(layer_idx, ()))
        return sealed + self._tail.layer_nbytes(layer_idx)

    def empty_like(self) -> PackedStore:
        return PackedStore()

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedStore:
        copied = PackedStore()
        for layer_idx in self._devices:  # segments never change
            copied._sealed[layer_idx] = list(self._sealed.get(layer_idx, ()))
            copied._tail.append(layer_idx, *self._tail.read(layer_idx))
        copied._devices = dict(self._devices)
        return copied

    def __repr__(self) -> str:
        return f"PackedStore({len(self._devices)} layers, {self.tokens(0)} tokens)"
