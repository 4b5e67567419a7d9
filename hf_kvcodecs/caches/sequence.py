"""Keys or values of one layer: sealed blocks, then a dense tail. Never changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ..codecs import RawCodec, TensorCodec
from ..codecs.words import from_words, to_words
from ..layouts import PackedBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of blocks in one form: packed by the sequence's codec, or raw where packing would not
    shrink them."""

    codec: TensorCodec
    packed: PackedBlocks

    @property
    def blocks(self) -> int:
        return self.packed.lead_shape[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """Tokens ``[batch, kv_heads, tokens, head_dim]`` of one layer's keys or values.

    Attributes:
        codec: packs a block when it is sealed; its dtype is the one stored.
        dtype: the dtype of the states given and returned (another one than stored only after a cast
            to fp8).
        segments: sealed blocks of ``codec.block_tokens`` tokens each, in order.
        tail: the tokens behind them as words ``[batch, kv_heads, tail_tokens, head_dim]``.

    Each method returns a new sequence and leaves this one as it was, so a view of an earlier state
    stays valid, and an operation that raises has changed nothing.
    """

    codec: TensorCodec
    dtype: torch.dtype
    segments: tuple[Segment, ...]
    tail: torch.Tensor

    @staticmethod
    def begin(codec: TensorCodec, states: torch.Tensor) -> PackedSequence:
        """An empty sequence for states like ``states``."""
        tail = states.new_empty((*states.shape[:2], 0, states.shape[3]), dtype=codec.word_dtype)
        return PackedSequence(codec=codec, dtype=states.dtype, segments=(), tail=tail)

    @property
    def sealed_tokens(self) -> int:
        return sum(segment.blocks for segment in self.segments) * self.codec.block_tokens

    @property
    def tokens(self) -> int:
        return self.sealed_tokens + self.tail.shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, head_dim = self.tail.shape
        return batch, heads, self.tokens, head_dim

    @property
    def packed_nbytes(self) -> int:
        return sum(segment.packed.nbytes for segment in self.segments)

    def append(self, states: torch.Tensor) -> PackedSequence:
        """With ``states`` behind the tail, dense for now (see :meth:`seal`). Casts to the stored
        dtype, if another."""
        return replace(
            self, tail=torch.cat([self.tail, to_words(_cast(states, self.codec.dtype))], dim=2)
        )

    def seal(self) -> PackedSequence:
        """With every full block of the tail packed, each for the first and only time."""
        size = self.codec.block_tokens
        blocks = self.tail.shape[2] // size
        if blocks == 0:
            return self
        words = self.tail[:, :, : blocks * size].unflatten(2, (blocks, size))
        # A copy, so that the sealed tokens' memory is freed.
        tail = self.tail[:, :, blocks * size :].clone()
        segments = _joined([*self.segments, *_encode(self.codec, words)])
        return replace(self, segments=segments, tail=tail)

    def dense(self) -> torch.Tensor:
        """All tokens as an exact tensor of ``dtype``; without sealed blocks this is the tail
        itself, else a copy."""
        return from_words(self._dense_words(), self.codec.dtype).to(self.dtype)

    def _dense_words(self) -> torch.Tensor:
        words = self.tail
        for segment in reversed(self.segments):  # nearly always one: each pass copies what follows
            words = segment.codec.decode(segment.packed, words)
        return words

    def crop(self, tokens: int) -> PackedSequence:
        """The first ``tokens`` tokens. A block that the cut falls into is decoded, exactly, and
        joins the tail."""
        sealed = self.sealed_tokens
        if tokens >= sealed:
            return replace(self, tail=self.tail[:, :, : tokens - sealed].clone())
        size = self.codec.block_tokens
        keep, rest = divmod(tokens, size)
        tail = self.tail[:, :, :0].clone()
        if rest:
            opened = replace(self, segments=self._blocks(keep, keep + 1), tail=tail)
            tail = opened._dense_words()[:, :, :rest].clone()
        return replace(self, segments=self._blocks(0, keep), tail=tail)

    def _blocks(self, start: int, stop: int) -> tuple[Segment, ...]:
        """Blocks ``start .. stop - 1`` as segments with memory of their own."""

        def parts() -> Iterator[Segment]:
            first = 0
            for segment in self.segments:
                low, high = max(start - first, 0), min(stop - first, segment.blocks)
                if low < high:
                    yield replace(segment, packed=segment.packed.slice_blocks(low, high))
                first += segment.blocks

        return tuple(parts())

    def select_batch(self, index: torch.Tensor) -> PackedSequence:
        """Rows ``index`` (int64) of the batch, in that order, repeats allowed. No block is
        decoded."""
        segments = tuple(replace(s, packed=s.packed.select(0, index)) for s in self.segments)
        return replace(
            self, segments=segments, tail=self.tail.index_select(0, index.to(self.tail.device))
        )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
        """The same tokens with ``function`` applied to every tensor held."""
        segments = tuple(replace(s, packed=s.packed.map(function)) for s in self.segments)
        return replace(self, segments=segments, tail=function(self.tail))


def _cast(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``states`` in the stored dtype. To fp8 finite numbers saturate (torch's own cast would make
    them NaN or inf)."""
    if states.dtype == dtype:
        return states
    limit = torch.finfo(dtype).max
    return torch.where(states.isfinite(), states.clamp(-limit, limit), states).to(dtype)


def _encode(codec: TensorCodec, words: torch.Tensor) -> Iterator[Segment]:
    """``words`` ``[batch, kv_heads, blocks, ...]`` as segments; blocks that would grow stay raw."""
    packed = codec.encode(words)
    raw_codec = RawCodec(dtype=codec.dtype, block_tokens=codec.block_tokens)
    raw = (packed.block_nbytes >= words[:, :, 0].nbytes).tolist()
    if not any(raw) or isinstance(codec, RawCodec):
        yield Segment(codec=codec, packed=packed)
        return
    start = 0
    for stop in range(1, len(raw) + 1):
        if stop == len(raw) or raw[stop] != raw[start]:
            if raw[start]:
                yield Segment(codec=raw_codec, packed=raw_codec.encode(words[:, :, start:stop]))
            else:
                yield Segment(codec=codec, packed=packed.slice_blocks(start, stop))
            start = stop


def _joined(segments: list[Segment]) -> tuple[Segment, ...]:
    """Neighbours in the same form as one segment, so that a long history is decoded in one pass."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and groups[-1][0].codec == segment.codec:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return tuple(
        replace(group[0], packed=PackedBlocks.cat([s.packed for s in group])) for group in groups
    )
