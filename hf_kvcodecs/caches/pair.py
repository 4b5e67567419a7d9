"""Keys and values of one layer together: one packed sequence for both where their shapes allow."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..codecs import TensorCodec
from .sequence import PackedSequence


class KVPair:
    """The keys and the values of a layer at one moment; never changed in place, like the sequences
    it is made of.

    Keys and values of one shape and dtype (every common model) are kept as one sequence with the
    values' rows behind the keys', so that one pass packs or unpacks both. Otherwise (multi-head
    latent attention, autocast) there are two.
    """

    def __init__(self, sequences: tuple[PackedSequence, ...]) -> None:
        self.sequences = sequences
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def begin(
        keys: torch.Tensor, values: torch.Tensor, codec: Callable[[torch.dtype], TensorCodec]
    ) -> KVPair:
        """An empty pair for states like these, with the codec that ``codec`` names for their
        dtypes."""
        together = keys.shape == values.shape and keys.dtype == values.dtype
        states = (torch.cat([keys[:, :, :0], values[:, :, :0]]),) if together else (keys, values)
        return KVPair(tuple(PackedSequence.begin(codec(part.dtype), part) for part in states))

    @property
    def together(self) -> bool:
        return len(self.sequences) == 1

    @property
    def batch(self) -> int:
        return self.sequences[0].shape[0] // (2 if self.together else 1)

    @property
    def tokens(self) -> int:
        return self.sequences[0].tokens

    @property
    def sealed_tokens(self) -> int:
        return self.sequences[0].sealed_tokens

    @property
    def device(self) -> torch.device:
        return self.sequences[0].tail.device

    def _part(self, index: int) -> PackedSequence:
        return self.sequences[0 if self.together else index]

    def shape(self, index: int) -> tuple[int, int, int, int]:
        """``[batch, kv_heads, tokens, head_dim]`` of the keys (0) or the values (1)."""
        _, heads, tokens, head_dim = self._part(index).shape
        return self.batch, heads, tokens, head_dim

    def dtype(self, index: int) -> torch.dtype:
        return self._part(index).dtype

    @property
    def packed_nbytes(self) -> int:
        """Bytes of sealed blocks."""
        return sum(sequence.packed_nbytes for sequence in self.sequences)

    @property
    def tail_nbytes(self) -> int:
        """Bytes of dense tokens."""
        return sum(sequence.tail.nbytes for sequence in self.sequences)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of as many tokens in a plain cache."""
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in self.sequences)

    @property
    def packed_elements(self) -> int:
        """Numbers in sealed blocks."""
        return sum(s.shape[0] * s.shape[1] * s.sealed_tokens * s.shape[3] for s in self.sequences)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KVPair:
        """With new tokens behind the others, dense for now."""
        states = (torch.cat([keys, values]),) if self.together else (keys, values)
        return KVPair(tuple(s.append(part) for s, part in zip(self.sequences, states, strict=True)))

    def map(self, function: Callable[[PackedSequence], PackedSequence]) -> KVPair:
        """``function`` (a crop, a seal, a move: the same for keys and values) applied to each
        sequence."""
        return KVPair(tuple(function(sequence) for sequence in self.sequences))

    def seal(self) -> KVPair:
        """With every full block of the tail packed."""
        return self.map(PackedSequence.seal)

    def crop(self, tokens: int) -> KVPair:
        """The first ``tokens`` tokens."""
        return self.map(lambda sequence: sequence.crop(tokens))

    def snapshot(self) -> KVPair:
        """For views: what a reader decodes stays there, not in the layer."""
        return KVPair(self.sequences)

    def select_batch(self, index: torch.Tensor) -> KVPair:
        """Rows ``index`` (int64) of the batch, in that order, repeats allowed."""
        rows = torch.cat([index, index + self.batch]) if self.together else index
        return self.map(lambda sequence: sequence.select_batch(rows))

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values, decoded at the first call and kept as long as this object
        lives."""
        if self._dense is None:
            parts = tuple(sequence.dense() for sequence in self.sequences)
            keys, values = parts[0].chunk(2) if self.together else parts
            self._dense = (keys, values)
        return self._dense
