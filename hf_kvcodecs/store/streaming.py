"""Layers of a full store on their way to the accelerator, a few at a time."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from .full import FullStore

SLOT_SPARE_TOKENS = 256


class LayerStream(ABC):
    """Hands out the layers of a store in order, each with new tokens appended.

    Attributes:
        bytes_read: bytes of the store that were moved or read for attention, as they cross the
            link.
    """

    def __init__(self, store: FullStore) -> None:
        self.store = store
        self.bytes_read = 0

    @abstractmethod
    def extend(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new tokens ``[batch, kv_heads, new, head_dim]`` to the store and returns all
        tokens of the layer on their device, valid until the next layer's turn."""

    @abstractmethod
    def load(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of a layer on the device, for a reader out of turn (compressing)."""

    def prefetch(self, most: int | None = None) -> None:
        """Starts moving the first layers (``most`` more of them), so that they are there when a
        forward begins."""
        return

    def drop(self) -> None:
        """Forgets what has been moved: the store changed otherwise than by :meth:`extend` and a
        crop."""
        return

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging area on the device at this moment."""
        return 0


class DirectStream(LayerStream):
    """For models on the CPU: the store's memory is the model's memory, nothing moves."""

    def extend(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.store.tokens(layer_idx) == 0
        self.bytes_read += self.store.layer_nbytes(layer_idx)
        self.store.append(layer_idx, keys, values)
        return (keys, values) if first else self.store.read(layer_idx)

    def load(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.store.read(layer_idx)


@dataclass(slots=True)
class _Slot:
    keys: torch.Tensor  # [capacity, batch, kv_heads, head_dim]
    values: torch.Tensor
    tokens: int = 0
    arrived: Any = None  # an event on the side stream

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class StagedStream(LayerStream):
    """Layers cross the link on a stream of their own, into a ring of staging slots.

    Args:
        store: where they lie.
        device: the accelerator (the CPU works too, with streams that do nothing).
        staging_bytes: size of the ring. None: two slots, the least (one is read while the next
            arrives). With the bytes of all layers, the whole cache is there when drafting ends.

    A slot is refilled once everything that the compute stream was given while it was read is done.
    New tokens go back to the store on a third stream, so that they wait for no transfer.
    """

    def __init__(
        self, store: FullStore, device: torch.device, staging_bytes: int | None = None
    ) -> None:
        super().__init__(store)
        self.device, self.limit_bytes = device, staging_bytes
        self._module = torch.get_device_module(device)
        arguments = () if device.type == "cpu" else (device,)
        self._side, self._back = (self._module.Stream(*arguments) for _ in range(2))
        self._slots: dict[int, _Slot] = {}
        self._free: list[_Slot] = []
        self._order: list[int] = []  # layers as a forward pass visits them
        self._last: int | None = None
        self._new_tokens = 0  # of the last read

    def _current(self) -> Any:
        return self._module.current_stream(self.device)

    def extend(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx not in self._order:
            self._order = sorted([*self._order, layer_idx])
        held, new = self.store.tokens(layer_idx), keys.shape[2]
        if not held:
            self._write_back(layer_idx, keys, values)
            return keys, values
        self._new_tokens = new
        slot = self._take(layer_idx, held, new)
        self._fill(self._order.index(layer_idx) + 1)
        self._current().wait_event(slot.arrived)
        for buffer, states in ((slot.keys, keys), (slot.values, values)):
            buffer[held : held + new].copy_(states.permute(2, 0, 1, 3))
        self._write_back(layer_idx, keys, values)
        return _as_states(slot, held + new)

    def load(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.store.tokens(layer_idx)
        slot = self._slots.get(layer_idx) if layer_idx == self._last else None
        if slot is None or slot.tokens != tokens:
            slot = self._take(layer_idx, tokens, 0)
        self._current().wait_event(slot.arrived)
        return _as_states(slot, tokens)

    def prefetch(self, most: int | None = None) -> None:
        self._release_last()
        self._fill(0, most)

    def drop(self) -> None:
        self._release_last()
        for slot in [*self._free, *self._slots.values()]:
            self._forget(slot)
        self._slots.clear()
        self._free.clear()

    def _take(self, layer_idx: int, held: int, new: int) -> _Slot:
        """The layer's slot, filled or being filled, with room for ``new`` tokens; the layer before
        gives its slot back."""
        self._release_last()
        slot = self._slots.get(layer_idx)
        if slot is not None and (slot.tokens < held or slot.keys.shape[0] < held + new):
            self._free.append(self._slots.pop(layer_idx))
            slot = None
        if slot is None:
            if not self._free and self._full(layer_idx):
                # Layers fetched ahead out of turn make room: the last of them are needed last.
                last = max(self._slots)
                self._free.append(self._slots.pop(last))
            slot = self._fetch(layer_idx, new)
        self._last = layer_idx
        return slot

    def _release_last(self) -> None:
        """The last layer's slot is free once what has been enqueued so far is done."""
        if self._last is not None and (slot := self._slots.pop(self._last, None)) is not None:
            self._side.wait_stream(self._current())
            self._free.append(slot)
        self._last = None

    def _fill(self, first: int, most: int | None = None) -> None:
        """Fetches layers from the ``first``-th on (``most`` of them) while the ring has room."""
        missing = [layer_idx for layer_idx in self._order[first:] if layer_idx not in self._slots]
        for layer_idx in missing[:most]:
            if not self._free and self._full(layer_idx):
                return
            self._fetch(layer_idx, 0)

    def _full(self, layer_idx: int) -> bool:
        """Whether the ring may have no slot more, for a layer of that size."""
        slots = [*self._slots.values(), *self._free]
        if len(slots) < 2:
            return False
        if self.limit_bytes is None:
            return True
        nbytes = max(slot.nbytes for slot in slots)
        return sum(slot.nbytes for slot in slots) + nbytes > self.limit_bytes

    def _fetch(self, layer_idx: int, new: int) -> _Slot:
        tokens = self.store.tokens(layer_idx)
        # Room for what the next read will add: a slot without it would be fetched a second time.
        slot = self._slot(layer_idx, tokens + max(new, self._new_tokens))
        self._side.wait_stream(self._back)  # what was written back is part of the layer
        with self._module.stream(self._side):
            self.bytes_read += self.store.copy_to(layer_idx, slot.keys, slot.values)
            slot.arrived = self._side.record_event()
        slot.tokens = tokens
        self._slots[layer_idx] = slot
        return slot

    def _slot(self, layer_idx: int, tokens: int) -> _Slot:
        """A free slot that takes so many tokens of the layer, or a new one."""
        like = self.store.like(layer_idx)
        for index, slot in enumerate(self._free):
            if all(
                buffer.shape[0] >= tokens
                and buffer.shape[1:] == part.shape[1:]
                and buffer.dtype == part.dtype
                for buffer, part in zip((slot.keys, slot.values), like, strict=True)
            ):
                return self._free.pop(index)
        # None fits (the sequence grew, or the batch changed): one gives its memory back.
        if self._free:
            self._forget(self._free.pop())
        with torch.inference_mode(False):  # it is written under whatever mode comes later
            keys, values = (
                torch.empty(
                    (tokens + SLOT_SPARE_TOKENS, *part.shape[1:]),
                    dtype=part.dtype,
                    device=self.device,
                )
                for part in like
            )
        # The compute stream's allocator may hand out memory that is still read there.
        self._side.wait_stream(self._current())
        return _Slot(keys, values)

    def _forget(self, slot: _Slot) -> None:
        if self.device.type == "cuda":  # copies into it may be under way
            slot.keys.record_stream(self._side)
            slot.values.record_stream(self._side)

    def _write_back(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._back.wait_stream(self._current())
        with self._module.stream(self._back):
            self.store.append(layer_idx, keys, values)
        if self.device.type == "cuda":
            keys.record_stream(self._back)
            values.record_stream(self._back)

    @property
    def staging_bytes(self) -> int:
        return sum(slot.nbytes for slot in [*self._slots.values(), *self._free])

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedStream:
        return StagedStream(copy.deepcopy(self.store, memo), self.device, self.limit_bytes)


def _as_states(slot: _Slot, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slot.keys[:tokens].permute(1, 2, 0, 3), slot.values[:tokens].permute(1, 2, 0, 3)


def stream_for(store: FullStore, device: torch.device, staging_bytes: int | None) -> LayerStream:
    """The way from ``store`` to ``device``."""
    if device.type == "cpu":
        return DirectStream(store)
    return StagedStream(store, device, staging_bytes)
