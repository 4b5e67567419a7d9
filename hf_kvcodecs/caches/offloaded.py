"""Keys and values of one layer whose packed blocks rest in host memory and visit the GPU for each
step."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..kernels.register_blocks import RegisterBlocks
from .fused import FusedPair, in_place

_MOVED = ("words", "pool", "raw")  # the bulk; tables and cursors stay on the device


@dataclass(slots=True)
class _Slot:
    """Device memory for the blocks of one layer at a time."""

    memory: torch.Tensor
    owner: weakref.ref[OffloadedPair] | None = None  # weak: no cycle keeps host memory alive
    arrived: torch.cuda.Event | None = None


class Staging:
    """Two slots on each device, used in turn by all layers of a cache: while attention reads one,
    the next layer's blocks are copied into the other on a stream of their own."""

    def __init__(self) -> None:
        self._slots: dict[torch.device, list[_Slot]] = {}  # the one used last at the end
        self._streams: dict[torch.device, torch.cuda.Stream | None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Staging:
        return Staging()  # copy.deepcopy sees to it that one becomes one

    @in_place
    def load(self, pair: OffloadedPair) -> RegisterBlocks:
        """Begins to copy ``pair``'s blocks into the slot that was used longest ago. They are there
        for kernels launched after :meth:`wait`."""
        device, host = pair.device, pair.host
        slots = self._slots.setdefault(device, [])
        if len(slots) < 2:
            slots.insert(0, _Slot(torch.empty(0, dtype=torch.int32, device=device)))
            self._streams.setdefault(
                device, torch.cuda.Stream(device) if device.type == "cuda" else None
            )
        slot = slots.pop(0)
        slots.append(slot)
        before = slot.owner() if slot.owner else None
        if before is not None:
            before.left_device()
        slot.owner, stream = weakref.ref(pair), self._streams[device]
        parts = {name: getattr(host, name) for name in _MOVED}
        sizes = [-(-part.nbytes // 16) * 4 for part in parts.values()]
        if slot.memory.numel() < sum(sizes):
            slot.memory = torch.empty(0, dtype=torch.int32, device=device)  # the old one goes first
            slot.memory = torch.empty(
                sum(sizes) + sum(sizes) // 16, dtype=torch.int32, device=device
            )
        staged: Any = {}
        for part, (name, source), size in zip(
            slot.memory.split([*sizes, slot.memory.numel() - sum(sizes)])[:3],
            parts.items(), sizes, strict=True,
        ):  # fmt: skip
            words = part[: source.nbytes // 4] if size else part
            staged[name] = words.view(source.dtype).view(source.shape)
        if stream is None:
            for name, source in parts.items():
                staged[name].copy_(source)
        else:
            # Behind all that was launched: readers of the slot, writers of the host's copy.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for name, source in parts.items():
                    staged[name].copy_(source, non_blocking=True)
            slot.memory.record_stream(stream)
            slot.arrived = torch.cuda.Event()
            slot.arrived.record(stream)
        return replace(host, **staged)

    def wait(self, pair: OffloadedPair) -> None:
        """Has the current stream wait until ``pair``'s blocks are there."""
        for slot in self._slots.get(pair.device, ()):
            if slot.owner and slot.owner() is pair and slot.arrived is not None:
                torch.cuda.current_stream(pair.device).wait_event(slot.arrived)

    def release(self, pair: OffloadedPair) -> None:
        """``pair`` has no use for its slot any more."""
        for slot in self._slots.get(pair.device, ()):
            if slot.owner and slot.owner() is pair:
                slot.owner = None


class OffloadedPair(FusedPair):
    """:class:`FusedPair` with its sealed blocks in (pinned) host memory.

    They are copied to the device before they are read; only newly sealed blocks are copied back.
    """

    @in_place
    def __init__(self, keys: torch.Tensor, values: torch.Tensor, staging: Staging) -> None:
        self.staging = staging
        self._on_device: RegisterBlocks | None = None
        self._host: RegisterBlocks | None = None
        super().__init__(keys, values)
        self._store()

    @property
    def host(self) -> RegisterBlocks:
        """All blocks, the bulk of them in host memory."""
        assert self._host is not None
        return self._host

    @property
    def blocks(self) -> RegisterBlocks:
        """The blocks on the device."""
        if self._on_device is None:
            self._on_device = self.staging.load(self)
        self.staging.wait(self)
        return self._on_device

    @blocks.setter
    def blocks(self, blocks: RegisterBlocks) -> None:
        self._on_device = blocks

    def left_device(self) -> None:
        """Another layer takes the slot."""
        self._on_device = None

    def prefetch(self) -> None:
        """Begins to copy the blocks to the device, without waiting for them."""
        if self._on_device is None:
            self._on_device = self.staging.load(self)

    @property
    def sealed_blocks(self) -> int:
        return (self._on_device or self.host).blocks

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the memory held for sealed blocks on the host, and of their tables."""
        held = [getattr(self.host, field.name) for field in fields(self.host)]
        return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))

    def _seal(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        held, sealed = self.blocks, self.sealed_blocks
        self.settle()
        pool, raw = self._pool_used, self._raw_used
        super()._seal(keys, values)
        blocks = self.blocks
        if blocks is not held:  # it grew
            self._store()
            return
        host = self.host
        capacity = blocks.table.shape[2]
        for row in range(blocks.table.shape[0] * blocks.table.shape[1]):
            new = slice(row * capacity + sealed, row * capacity + blocks.blocks)
            host.words[new].copy_(blocks.words[new], non_blocking=True)
        host.pool[pool:].copy_(blocks.pool[pool:], non_blocking=True)
        host.raw[raw:].copy_(blocks.raw[raw:], non_blocking=True)
        host.blocks = blocks.blocks

    def _store(self) -> None:
        """Copies all blocks to the host and gives up the device's memory."""
        held = self._on_device
        assert held is not None
        pinned = self.device.type == "cuda"
        copies: Any = {}
        for name in _MOVED:
            source = getattr(held, name)
            copies[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            copies[name].copy_(source, non_blocking=True)
        self._host = replace(held, **copies)
        self.staging.release(self)
        self._on_device = None

    def _new(self, keys: torch.Tensor, values: torch.Tensor) -> FusedPair:
        return OffloadedPair(keys, values, self.staging)

    def _with(self, tail: torch.Tensor, blocks: RegisterBlocks) -> FusedPair:
        held = self.blocks
        pair = super()._with(tail, blocks)
        assert isinstance(pair, OffloadedPair)
        if blocks.words is held.words:  # other rows of the same blocks
            host = self.host
            pair._host = replace(blocks, words=host.words, pool=host.pool, raw=host.raw)
            pair._on_device = None
        else:
            pair._store()
        return pair

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedPair:
        pair = super().__deepcopy__(memo)
        assert isinstance(pair, OffloadedPair)
        pair.staging = copy.deepcopy(self.staging, memo)
        return pair
