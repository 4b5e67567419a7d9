"""What a cache takes in memory, counted from the tensors that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from .layer import GAACLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of a cache at one moment.

    Attributes:
        tokens: tokens of the longest layer (padding included).
        packed_bytes: sealed blocks, with every table, index and count (on GPUs also memory kept for
            the next ones).
        tail_bytes: dense tokens: tails, and layers that stay dense (sliding window, linear
            attention).
        dense_bytes: what the same tokens take in transformers' own layers, in the model's dtype.
        packed_elements: numbers (of keys and values) held in sealed blocks.
    """

    tokens: int
    packed_bytes: int
    tail_bytes: int
    dense_bytes: int
    packed_elements: int

    @property
    def total_bytes(self) -> int:
        return self.packed_bytes + self.tail_bytes

    @property
    def ratio(self) -> float:
        """Bytes held / dense bytes, the tail counted on both sides; smaller is better, 1.0 for an
        empty cache."""
        return self.total_bytes / self.dense_bytes if self.dense_bytes else 1.0

    @property
    def factor(self) -> float:
        """Dense bytes / bytes held: how many times smaller the whole cache is."""
        return 1 / self.ratio

    @property
    def bits_per_element(self) -> float:
        """Bits of a number in the sealed blocks, all tables counted, the tail left out; NaN while
        none is sealed."""
        return (
            8 * self.packed_bytes / self.packed_elements if self.packed_elements else float("nan")
        )


def measure(layers: Iterable[Any]) -> MemoryReport:
    """The report over cache layers: ours by their parts, any other by all tensors it holds."""
    tokens = packed = tail = dense = elements = 0
    for layer in layers:
        if isinstance(layer, GAACLayer):
            tokens = max(tokens, layer.get_seq_length())
            if layer.is_initialized:
                packed += layer.pair.packed_nbytes
                tail += layer.pair.tail_nbytes
                dense += layer.pair.dense_nbytes
                elements += layer.pair.packed_elements
        else:
            held = storage_bytes(vars(layer))
            tail += held
            dense += held
            if hasattr(layer, "get_seq_length"):
                tokens = max(tokens, int(layer.get_seq_length()))
    return MemoryReport(
        tokens=tokens,
        packed_bytes=packed,
        tail_bytes=tail,
        dense_bytes=dense,
        packed_elements=elements,
    )


def storage_bytes(tree: Any) -> int:
    """Bytes of the memory behind all tensors in ``tree``, each piece of memory once (a slice keeps
    its whole)."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(tree)
    }
    return sum(storages.values())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    leaves, _ = tree_flatten(tree)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
