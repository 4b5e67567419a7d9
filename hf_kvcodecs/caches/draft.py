"""The draft face of one layer: kept tokens, as many as each head has, and an exact tail."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..compressors import Compressor
from ..compressors.quantise import KIVI, Quantised
from ..kernels.ragged_attention import (
    PackedSegments,
    ragged_attention,
    ragged_attention_works,
    unsupported_reason,
)
from .attention_view import SDPACall


@dataclass(slots=True)
class PackedHistory:
    """The quantised part of a draft layer: ``counts[h]`` tokens of head ``h``, head after head."""

    keys: Quantised
    values: Quantised
    counts: list[int]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class DraftLayer:
    """Compressed keys and values of one layer of one request, ready to be attended to.

    Storage is ragged: head ``h`` has a segment of its own in one flat buffer, with its kept tokens
    and spare rows behind them that the tail is written into, so that a head's keys are one piece of
    memory and nothing is copied when the tail grows. Quantised tokens are held beside it and
    decoded when attended to (inside the kernel where it can read them), or once
    (``hold_decoded``), which takes the memory of exact tokens.

    Args:
        keys, values: ``[1, kv_heads, tokens, head_dim]``: the exact states.
        kept: by head, ascending positions (int64) of the tokens to keep.
        compressor: its quantiser packs them, if it has one.
        spare_tokens: rows for the tail at first; it grows.
        hold_decoded: keep quantised tokens decoded as well.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: list[torch.Tensor],
        compressor: Compressor,
        *,
        spare_tokens: int,
        hold_decoded: bool,
    ) -> None:
        self.hold_decoded = hold_decoded
        self.compressor = compressor
        self.tail_tokens = 0
        self.head_dims = keys.shape[-1], values.shape[-1]
        self.packed: PackedHistory | None = None
        pieces = [
            (keys[0, head].index_select(0, index), values[0, head].index_select(0, index))
            for head, index in enumerate(index.to(keys.device) for index in kept)
        ]
        pieces = self._quantise(pieces, keys.dtype, values.dtype)
        self._packed_segments = self._segments_for_kernel()
        self.counts = [piece[0].shape[0] for piece in pieces]
        self._place(pieces, spare_tokens)

    def _quantise(
        self,
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Packs what the quantiser takes of each head; returns what stays in the flat buffer."""
        quantiser = self.compressor.quantiser
        if quantiser is None:
            return pieces
        counts = [quantiser.packable(keys.shape[0]) for keys, _ in pieces]
        if not sum(counts):
            return pieces
        joined = [
            torch.cat([piece[part][:count] for piece, count in zip(pieces, counts, strict=True)])
            for part in (0, 1)
        ]
        self.packed = PackedHistory(*quantiser.encode(*joined), counts)
        if not self.hold_decoded:
            return [
                (keys[count:], values[count:])
                for (keys, values), count in zip(pieces, counts, strict=True)
            ]
        decoded = self._decoded(key_dtype, value_dtype)
        return [
            (torch.cat([old[0], new[0][count:]]), torch.cat([old[1], new[1][count:]]))
            for old, new, count in zip(decoded, pieces, counts, strict=True)
        ]

    def _segments_for_kernel(self) -> PackedSegments | None:
        """The quantised tokens as the kernel reads them, if it can and they are not decoded."""
        if not isinstance(self.compressor.quantiser, KIVI) or not self._decodes:
            return None
        assert self.packed is not None
        keys, values, counts = self.packed.keys, self.packed.values, self.packed.counts
        starts = [sum(counts[:head]) for head in range(len(counts))]
        segments = PackedSegments(
            key_words=keys.words.squeeze(-1),
            key_scale=keys.scale.squeeze(-1),
            key_minimum=keys.minimum.squeeze(-1),
            value_words=values.words.squeeze(-1),
            value_scale=values.scale.squeeze(-1),
            value_minimum=values.minimum.squeeze(-1),
            starts=torch.tensor(starts, device=keys.words.device),
            counts=torch.tensor(counts, device=keys.words.device),
        )
        fits = self.head_dims[0] == self.head_dims[1]
        return segments if fits and segments.unsupported_reason(self.head_dims[0]) is None else None

    def _decoded(
        self, key_dtype: torch.dtype, value_dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert self.packed is not None
        assert self.compressor.quantiser is not None
        keys, values = self.compressor.quantiser.decode(
            self.packed.keys, self.packed.values, key_dtype, self.head_dims
        )
        values = values.to(value_dtype)
        return list(
            zip(keys.split(self.packed.counts), values.split(self.packed.counts), strict=True)
        )

    def _place(self, pieces: list[tuple[torch.Tensor, torch.Tensor]], spare: int) -> None:
        """Lays the segments out, each with ``spare`` rows behind it."""
        self.capacity = spare
        starts, total = [], 0
        for keys, _ in pieces:
            starts.append(total)
            total += keys.shape[0] + spare
        like_keys, like_values = pieces[0]
        # Zeros: static attention multiplies spare rows too, by weights of 0. Ordinary tensors: they
        # are written under whatever mode comes later.
        with torch.inference_mode(False):
            self.keys, self.values = (
                torch.zeros((total, width), dtype=like.dtype, device=like.device)
                for like, width in zip((like_keys, like_values), self.head_dims, strict=True)
            )
        self.starts = starts
        self._note_segments()
        for start, (keys, values) in zip(starts, pieces, strict=True):
            self.keys[start : start + keys.shape[0]] = keys
            self.values[start : start + keys.shape[0]] = values
        self._tail_rows = torch.tensor(
            [start + count for start, count in zip(starts, self.counts, strict=True)],
            device=self.keys.device,
        )[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes that the layer needs: codes, scales, exact tokens, the tail; not the spare rows,
        and not the copy that ``hold_decoded`` makes."""
        return self.nbytes_at(self.keys.element_size(), self.values.element_size())

    def nbytes_at(self, key_bytes: int, value_bytes: int) -> int:
        """:attr:`nbytes` if an exact number took so many bytes."""
        width = self.head_dims[0] * key_bytes + self.head_dims[1] * value_bytes
        exact = sum(self.counts) + len(self.counts) * self.tail_tokens
        if self.packed is not None and self.hold_decoded:
            exact -= sum(self.packed.counts)
        index = 8 * len(self.counts)  # where each head begins and how many tokens it has
        return exact * width + index + (self.packed.nbytes if self.packed else 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of every tensor held, spare rows and decoded copies included."""
        return self.keys.nbytes + self.values.nbytes + (self.packed.nbytes if self.packed else 0)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds exact tokens ``[1, kv_heads, new, head_dim]`` to the tail."""
        new = keys.shape[2]
        if self.tail_tokens + new > self.capacity:
            self._grow(new)
        rows = self._tail_rows + torch.arange(
            self.tail_tokens, self.tail_tokens + new, device=self.keys.device
        )
        self.keys.index_copy_(0, rows.flatten(), keys[0].flatten(0, 1))
        self.values.index_copy_(0, rows.flatten(), values[0].flatten(0, 1))
        self.tail_tokens += new

    def append_at(self, keys: torch.Tensor, values: torch.Tensor, cursor: torch.Tensor) -> None:
        """Writes one exact token ``[1, kv_heads, 1, head_dim]`` to the tail's row ``cursor``
        (int64 ``[1]`` on the device): a fixed sequence of kernels, for CUDA graphs.
        ``tail_tokens`` is the caller's to move."""
        rows = (self._tail_rows[:, 0] + cursor).flatten()
        self.keys.index_copy_(0, rows, keys[0, :, 0])
        self.values.index_copy_(0, rows, values[0, :, 0])

    def attend_static(
        self,
        query: torch.Tensor,
        scale: float | None,
        tail_bias: torch.Tensor,
        cursor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention ``[1, q_heads, 1, head_dim]`` of one token over everything kept and the rows of
        the tail that ``tail_bias`` (float32 ``[capacity]``, 0 or -inf) shows: a fixed sequence of
        kernels, for CUDA graphs. With ``cursor`` (int64 ``[1]``, the tail's newest row) a kernel
        reads those rows alone, where there is one; else the whole capacity is read."""
        heads = len(self.counts)
        scale = float(self.head_dims[0]) ** -0.5 if scale is None else scale
        grouped = query[0, :, 0].unflatten(0, (heads, -1))  # [kv_heads, group, head_dim]
        if cursor is not None and self._kernel_fits(grouped):
            starts, counts = self._segments_at
            out = ragged_attention(
                grouped.contiguous(), self.keys, self.values, starts, counts, cursor, scale,
                self._packed_segments,
            )  # fmt: skip
            return out.flatten(0, 1)[None, :, None]
        sizes = [count + self.capacity for count in self.counts]
        if len(set(sizes)) == 1 and not self._decodes:
            keys, values = (
                part.view(heads, sizes[0], part.shape[-1]) for part in (self.keys, self.values)
            )
            out = _attend_biased(grouped, keys, values, scale, tail_bias)
            return out.flatten(0, 1)[None, :, None]
        decoded = self._decoded(self.keys.dtype, self.values.dtype) if self._decodes else None
        outputs = []
        for head, (start, size) in enumerate(zip(self.starts, sizes, strict=True)):
            keys, values = self.keys[start : start + size], self.values[start : start + size]
            if decoded is not None:
                keys = torch.cat([decoded[head][0], keys])
                values = torch.cat([decoded[head][1], values])
            outputs.append(
                _attend_biased(grouped[head][None], keys[None], values[None], scale, tail_bias)
            )
        return torch.cat(outputs).flatten(0, 1)[None, :, None]

    def _kernel_fits(self, query: torch.Tensor) -> bool:
        """Whether the kernel for ragged segments takes them."""
        packed = self._packed_segments
        return (
            self.keys.device.type == "cuda"
            and (packed is not None or not self._decodes)
            and unsupported_reason(query, self.keys, self.values) is None
            and ragged_attention_works(
                self.keys.device, self.keys.dtype, self.head_dims[0], packed.bits if packed else 0
            )
        )

    @property
    def _decodes(self) -> bool:
        """Whether quantised tokens are held in no other form."""
        return self.packed is not None and not self.hold_decoded

    def _note_segments(self) -> None:
        """Where each head begins and how many tokens it has kept, for the kernel."""
        self._segments_at = tuple(
            torch.tensor(numbers, dtype=torch.int64, device=self.keys.device)
            for numbers in (self.starts, self.counts)
        )

    def _grow(self, new: int) -> None:
        pieces = [
            (self.keys[start:stop].clone(), self.values[start:stop].clone())
            for start, stop in self._segments()
        ]
        counts, tail = self.counts, self.tail_tokens
        self.counts = [count + tail for count in counts]
        self._place(pieces, max(2 * tail, tail + 4 * new) - tail)
        # The tail is part of the segments now: rows are counted from behind the kept tokens again.
        self.counts, self.capacity = counts, self.capacity + tail
        self._tail_rows = self._tail_rows - tail
        self._note_segments()

    def cut_tail(self, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens of the tail."""
        assert 0 <= tokens <= self.tail_tokens
        self.tail_tokens = tokens

    def _segments(self) -> list[tuple[int, int]]:
        return [
            (start, start + count + self.tail_tokens)
            for start, count in zip(self.starts, self.counts, strict=True)
        ]

    def attend(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention ``[1, q_heads, new, head_dim]`` of the tail's newest ``new`` tokens, causal
        among themselves, over everything before."""
        heads = len(self.counts)
        grouped = query[0].unflatten(0, (heads, -1))  # [kv_heads, group, new, head_dim]
        if len(set(self.counts)) == 1 and not self._decodes:
            tokens = self.counts[0] + self.tail_tokens
            keys, values = (
                states.view(heads, -1, states.shape[-1])[:, :tokens]
                for states in (self.keys, self.values)
            )
            return _attend(grouped, keys, values, scale).flatten(0, 1)[None]
        decoded = self._decoded(self.keys.dtype, self.values.dtype) if self._decodes else None
        outputs = []
        for head, (start, stop) in enumerate(self._segments()):
            keys, values = self.keys[start:stop], self.values[start:stop]
            if decoded is not None:
                keys = torch.cat([decoded[head][0], keys])
                values = torch.cat([decoded[head][1], values])
            outputs.append(_attend(grouped[head][None], keys[None], values[None], scale))
        return torch.cat(outputs).flatten(0, 1)[None]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """``query`` ``[heads, group, new, d]`` over ``keys``, ``values`` ``[heads, tokens, d]``."""
    _, group, new, _ = query.shape
    if new == 1:  # a group's queries are as good as tokens
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys[:, None], values[:, None], scale=scale
        )
        return out.transpose(1, 2)
    tokens = keys.shape[1]
    token = torch.arange(tokens, device=keys.device)
    mask = token <= token[tokens - new :, None]
    keys, values = (states[:, None].expand(-1, group, -1, -1) for states in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)


def _attend_biased(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    tail_bias: torch.Tensor,
) -> torch.Tensor:
    """``query`` ``[heads, group, d]`` over ``keys``, ``values`` ``[heads, rows, d]``; the bias is
    for the last rows. Scores are float32 from the product on."""
    if keys.dtype != torch.float32 and _multiplies_to_float32(keys.device, keys.dtype):
        scores = torch.bmm(query, keys.transpose(-1, -2), out_dtype=torch.float32) * scale
    else:
        scores = query.float() @ keys.float().transpose(-1, -2) * scale
    scores[..., scores.shape[-1] - tail_bias.shape[0] :] += tail_bias
    return scores.softmax(-1).to(values.dtype) @ values


@functools.cache
def _multiplies_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies ``dtype`` to float32 there without widening the inputs."""
    if device.type != "cuda":
        return False
    one = torch.ones((1, 16, 16), dtype=dtype, device=device)
    try:
        return bool(torch.bmm(one, one, out_dtype=torch.float32)[0, 0, 0] == 16)
    except (TypeError, RuntimeError, NotImplementedError):
        return False


@dataclass(slots=True)
class StaticStep:
    """Where a step of fixed shape stands: the tail's row that its token goes to, and which rows are
    seen.

    Attributes:
        cursor: int64 ``[1]``.
        tail_bias: float32 ``[capacity]``.
    """

    cursor: torch.Tensor
    tail_bias: torch.Tensor

    @staticmethod
    def allocate(capacity: int, device: torch.device) -> StaticStep:
        """At the tail's first row."""
        with torch.inference_mode(False):
            return StaticStep(
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.zeros(capacity, dtype=torch.float32, device=device),
            )

    def refresh(self) -> None:
        """Makes the bias what the cursor says, on the device."""
        row = torch.arange(self.tail_bias.shape[0], device=self.cursor.device)
        self.tail_bias.zero_().masked_fill_(row > self.cursor, float("-inf"))


class DraftStates:
    """What attention is told of a draft layer: as many tokens as the text has."""

    def __init__(
        self,
        layer: DraftLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        tokens: int,
        static: StaticStep | None = None,
    ) -> None:
        batch, heads, new, _ = keys.shape
        self.layer, self.like, self.new_tokens, self.static = layer, (keys, values), new, static
        self.shapes = (
            torch.Size((batch, heads, tokens, keys.shape[-1])),
            torch.Size((batch, heads, tokens, values.shape[-1])),
        )

    def attend(self, query: torch.Tensor, call: SDPACall) -> torch.Tensor:
        # The mask says what the draft face has by construction: padding is not kept, and the new
        # tokens see each other causally. What a model hides beyond that, a draft may see.
        if self.static is not None:
            static = self.static
            return self.layer.attend_static(query, call.scale, static.tail_bias, static.cursor)
        return self.layer.attend(query, call.scale)

    def dense(self, part: int) -> torch.Tensor:
        raise RuntimeError(
            "the draft face answers scaled_dot_product_attention only, and something else was "
            "asked of its keys or values; draft under sdpa attention: "
            "model.set_attn_implementation('sdpa')"
        )
