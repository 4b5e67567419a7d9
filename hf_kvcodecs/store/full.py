"""The exact KV cache of one or more requests in memory that is cheap: the host's, or a file's."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

GROWTH = 1.25
FIRST_GROWTH = 1.0 + 1 / 32
SPARE_TOKENS = 256


class FullStore(ABC):
    """Exact keys and values of every layer, ``[batch, kv_heads, tokens, head_dim]`` each.

    Layers are created by their first :meth:`append`. Copies from and to an accelerator are enqueued
    on its current stream; whoever reads on the host waits for them.
    """

    @abstractmethod
    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds tokens behind those held; of the same batch, heads, widths and dtypes."""

    @abstractmethod
    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of a layer, on the CPU, bit for bit what was appended; shares memory with the
        store where it can, and is valid until the next call that changes the layer."""

    @abstractmethod
    def copy_to(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Writes all tokens of a layer into the first rows of token-major buffers
        ``[capacity, batch, kv_heads, head_dim]`` on any device; returns the bytes that crossed."""

    @abstractmethod
    def tokens(self, layer_idx: int) -> int:
        """Tokens held, 0 for a layer not seen yet."""

    @abstractmethod
    def like(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Empty tensors ``[0, batch, kv_heads, head_dim]`` with the dtypes of a layer."""

    @abstractmethod
    def crop(self, layer_idx: int, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets every layer."""

    @abstractmethod
    def layer_nbytes(self, layer_idx: int) -> int:
        """Bytes of the tokens held, as they cross the link."""

    @abstractmethod
    def empty_like(self) -> FullStore:
        """A store of the same kind and options that holds nothing."""

    def select_rows(self, layer_idx: int, index: torch.Tensor) -> None:
        """Keeps rows ``index`` (int64) of the batch, in that order, repeats allowed."""
        keys, values = (part.index_select(0, index.cpu()) for part in self.read(layer_idx))
        self.replace(layer_idx, keys, values)

    def replace(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts other tokens in the place of a layer's, of any batch."""
        self.crop(layer_idx, 0)
        self.append(layer_idx, keys, values)


def wait_for_device() -> None:
    """Copies from an accelerator are asynchronous: the host reads only what has arrived."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def host_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory, pinned where there is a CUDA device."""
    with torch.inference_mode(False):  # it is written under whatever mode comes later
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


@dataclass(slots=True)
class _Layer:
    keys: torch.Tensor  # [capacity, batch, kv_heads, head_dim]: appending and moving are contiguous
    values: torch.Tensor
    tokens: int = 0


class HostStore(FullStore):
    """Token-major buffers in host memory, pinned where there is a CUDA device.

    Args:
        spare_tokens: room behind what is held when buffers are made: pinning memory anew takes
            milliseconds a layer.
    """

    def __init__(self, spare_tokens: int = SPARE_TOKENS) -> None:
        self.spare_tokens = spare_tokens
        self._layers: dict[int, _Layer] = {}

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return host_empty(shape, dtype)

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        layer = self._with_room(layer_idx, keys, values)
        start, stop = layer.tokens, layer.tokens + keys.shape[2]
        for buffer, states in ((layer.keys, keys), (layer.values, values)):
            # From a contiguous source an asynchronous copy is one transfer.
            source = states.permute(2, 0, 1, 3).contiguous()
            buffer[start:stop].copy_(source, non_blocking=True)
        layer.tokens = stop

    def _with_room(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> _Layer:
        layer = self._layers.get(layer_idx)
        new_tokens = keys.shape[2]
        if layer is not None and not layer.tokens:  # nothing to keep: another batch may follow
            fits = layer.keys.shape[1:] == _row(keys) and layer.values.shape[1:] == _row(values)
            if fits and layer.keys.dtype == keys.dtype and layer.values.dtype == values.dtype:
                wait_for_device()  # the device may still read what was there
            else:
                layer = None
        if layer is not None and layer.tokens + new_tokens <= layer.keys.shape[0]:
            return layer
        held = layer.tokens if layer else 0
        # A prompt leaves little room behind it, what grows token by token more each time.
        growth = GROWTH if held else FIRST_GROWTH
        capacity = int(growth * (held + new_tokens)) + self.spare_tokens
        buffers = []
        for name, states in (("keys", keys), ("values", values)):
            batch, heads, _, head_dim = states.shape
            shape = (capacity, batch, heads, head_dim)
            buffers.append(self._allocate(shape, states.dtype, f"{name}-{layer_idx}"))
        grown = _Layer(buffers[0], buffers[1], held)
        wait_for_device()  # the old buffers may still be written, or read by the device
        if layer is not None:
            grown.keys[:held] = layer.keys[:held]
            grown.values[:held] = layer.values[:held]
        self._layers[layer_idx] = grown
        return grown

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        wait_for_device()
        keys, values = self._held(layer_idx)
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    def _held(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layers[layer_idx]
        return layer.keys[: layer.tokens], layer.values[: layer.tokens]

    def copy_to(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        for target, source in zip((keys, values), self._held(layer_idx), strict=True):
            target[: source.shape[0]].copy_(source, non_blocking=True)
        return self.layer_nbytes(layer_idx)

    def tokens(self, layer_idx: int) -> int:
        layer = self._layers.get(layer_idx)
        return layer.tokens if layer else 0

    def like(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layers[layer_idx]
        return layer.keys[:0], layer.values[:0]

    def crop(self, layer_idx: int, tokens: int) -> None:
        if layer := self._layers.get(layer_idx):
            layer.tokens = min(layer.tokens, tokens)

    def clear(self) -> None:
        wait_for_device()
        self._layers.clear()

    def layer_nbytes(self, layer_idx: int) -> int:
        if layer_idx not in self._layers:
            return 0
        return sum(buffer.nbytes for buffer in self._held(layer_idx))

    def empty_like(self) -> FullStore:
        return HostStore(self.spare_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> FullStore:
        copied = self.empty_like()
        for layer_idx in self._layers:
            copied.append(layer_idx, *self.read(layer_idx))
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._layers)} layers, {self.tokens(0)} tokens)"


def _row(states: torch.Tensor) -> torch.Size:
    """The shape of one token of ``states`` in a buffer."""
    batch, heads, _, head_dim = states.shape
    return torch.Size((batch, heads, head_dim))


class DiskStore(HostStore):
    """The same buffers as memory-mapped files: the operating system pages them in and out.

    Args:
        folder: where the files go; None for the system's temporary folder. They have no name once
            they are open, and are gone with the store.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.folder = folder

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        handle, path = tempfile.mkstemp(prefix=f"hf_kvcodecs-{name}-", dir=self.folder)
        os.close(handle)
        elements = torch.Size(shape).numel()
        with torch.inference_mode(False):
            buffer = torch.from_file(path, shared=True, size=elements, dtype=dtype)
        os.unlink(path)  # the mapping keeps the bytes alive, and nothing is left behind
        return buffer.view(shape)

    def empty_like(self) -> DiskStore:
        return DiskStore(self.folder)
