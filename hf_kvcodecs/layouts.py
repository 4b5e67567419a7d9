"""What packed bytes look like: the exponent code, the ``plain`` word order, and their container.

The exponent code (version 1)
-----------------------------
A floating-point number is a sign ``s``, an exponent field ``e`` and a mantissa ``f`` of ``M`` bits.
Trained models keep the exponents of one (head, channel) within a short window, so ``e`` is stored
as a code relative to a *base*: the largest exponent field of that channel within the block. With a
window of ``W`` bits::

    c = e - base + 2**W - 1          # 0 .. 2**W - 1, all ones for the channel's largest exponent

For bf16 and fp16 (``W = 4``) the base is the largest *finite* exponent field, ``c = 0`` is kept for
+0 and -0, and every other number whose code would fall outside ``1 .. 15`` (infinity, NaN,
subnormals, numbers more than 14 octaves below the channel's largest) is a *misfit*, listed with its
position and its bits. For fp8 the window covers the whole exponent field (``W`` = 4 for E4M3, 5 for
E5M2): there are no misfits.

``F`` low bits of ``c`` are stored for every element. The remaining ``W - F`` bits are nearly always
ones; they are stored only for those *units* (``U`` consecutive tokens of one channel) where some
element has a zero among them: planes ``F .. F + n - 1`` for a unit whose tag is ``n``, all planes
above being ones.

======== === === === === ========= ==============================================
format    M   W   F   U  tag bits  fixed bits per element (sign, mantissa, low code)
======== === === === === ========= ==============================================
bf16      7   4   3  16      1     11
fp16     10   4   3  16      1     14
fp8_e4m3  3   4   1   8      2      5
fp8_e5m2  2   5   2   8      2      5
======== === === === === ========= ==============================================

Word order ``plain`` (version 1)
--------------------------------
Every array leads with ``[batch, kv_heads, blocks]``; a *record* is one index of these three. Within
a record of ``T`` tokens and ``D`` channels (``D`` even; an odd head_dim gets one zero channel
more), with the fixed bits of an element read as ``v = f | (c mod 2**F) << M | s << (M + F)``, all
words little-endian:

- ``base`` uint8 ``[D]``.
- ``low`` int16 ``[T/2, D]``, only where an element has 8 fixed bits or more: bits 0-7 of ``v`` of
  token ``2i``, then those of token ``2i + 1`` in the upper byte.
- ``bits`` int16 ``[T/16, P, D]``: plane ``p`` holds the next bit of ``v``; bit ``i`` of word ``g``
  is token ``16 g + i``.
- ``tags`` uint8 ``[T/U, ceil(D * tag_bits / 8)]``: the tag of channel ``d`` begins at bit
  ``tag_bits * d`` of the row.
- pool ``escapes`` (int16 for ``U`` = 16, uint8 for ``U`` = 8): for each unit with tag ``n > 0``, in
  the order (record, unit row, channel), ``n`` words, the planes ``F``, ``F + 1``, ...; bit ``i`` is
  the unit's token ``i``.
- pools ``patch_index`` int32 (``token * D + channel``, ascending) and ``patch_bits`` int16: the
  misfits.
- counts ``escapes`` and ``patches`` int32: how many words of each pool belong to each record.

Source: the exponent window and group-adaptive widths follow GAAC (arXiv 2610.38210). We differ in
taking each base from the very tokens that are sealed (no calibration), in units along tokens, and
in listing misfits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from .errors import CorruptDataError, UnsupportedLayoutError

WORD_TOKENS = 16  # tokens per bit-plane word


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentLayout:
    """How the numbers of one floating-point format are coded; see the module's docstring for every
    field."""

    float_format: str
    mantissa_bits: int
    exponent_bits: int
    window_bits: int
    fixed_code_bits: int
    unit_tokens: int
    tag_bits: int
    reserve_zero: bool
    word_order: str = "plain"
    version: int = 1

    @property
    def word_bits(self) -> int:
        """Bits of one dense element."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def fixed_bits(self) -> int:
        """Bits stored for every element: sign, mantissa, low code bits."""
        return 1 + self.mantissa_bits + self.fixed_code_bits

    @property
    def has_low_bytes(self) -> bool:
        return self.fixed_bits >= 8

    @property
    def plane_count(self) -> int:
        return self.fixed_bits - 8 if self.has_low_bytes else self.fixed_bits

    @property
    def optional_planes(self) -> int:
        return self.window_bits - self.fixed_code_bits

    @property
    def escape_dtype(self) -> torch.dtype:
        return torch.int16 if self.unit_tokens == WORD_TOKENS else torch.uint8

    def tag_bytes(self, channels: int) -> int:
        return -(-channels * self.tag_bits // 8)


EXPONENT_LAYOUTS = {
    layout.float_format: layout
    for layout in (
        ExponentLayout(
            float_format="bf16",
            mantissa_bits=7,
            exponent_bits=8,
            window_bits=4,
            fixed_code_bits=3,
            unit_tokens=16,
            tag_bits=1,
            reserve_zero=True,
        ),
        ExponentLayout(
            float_format="fp16",
            mantissa_bits=10,
            exponent_bits=5,
            window_bits=4,
            fixed_code_bits=3,
            unit_tokens=16,
            tag_bits=1,
            reserve_zero=True,
        ),
        ExponentLayout(
            float_format="fp8_e4m3",
            mantissa_bits=3,
            exponent_bits=4,
            window_bits=4,
            fixed_code_bits=1,
            unit_tokens=8,
            tag_bits=2,
            reserve_zero=False,
        ),
        ExponentLayout(
            float_format="fp8_e5m2",
            mantissa_bits=2,
            exponent_bits=5,
            window_bits=5,
            fixed_code_bits=2,
            unit_tokens=8,
            tag_bits=2,
            reserve_zero=False,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """Sealed blocks of one tensor: planes of one size per record, pools of another size for each.

    Attributes:
        planes: tensors ``[batch, kv_heads, blocks, ...]``.
        pools: one-dimensional tensors; the words of a record are contiguous, records in row-major
            order.
        counts: int32 ``[batch, kv_heads, blocks]``, the words of each record in the pools named
            alike.
        pool_counts: which entry of ``counts`` measures which pool.

    Never changed in place: every method returns a new container (sharing memory where nothing
    moved).
    """

    planes: dict[str, torch.Tensor]
    pools: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    pool_counts: dict[str, str] = field(default_factory=dict)

    @property
    def lead_shape(self) -> tuple[int, int, int]:
        """``(batch, kv_heads, blocks)``."""
        shape = next(iter(self.planes.values())).shape
        return shape[0], shape[1], shape[2]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor held, named ``planes.NAME``, ``pools.NAME`` or ``counts.NAME``."""
        groups = {"planes": self.planes, "pools": self.pools, "counts": self.counts}
        return {f"{group}.{name}": t for group, held in groups.items() for name, t in held.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, index tables included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def block_nbytes(self) -> torch.Tensor:
        """int64 ``[blocks]``: bytes that each block takes, its share of the pools included."""
        blocks = self.lead_shape[2]
        fixed = sum(t.nbytes for held in (self.planes, self.counts) for t in held.values())
        total = torch.full((blocks,), fixed // max(blocks, 1), dtype=torch.int64)
        for name, pool in self.pools.items():
            words = self.counts[self.pool_counts[name]].sum((0, 1), dtype=torch.int64).cpu()
            total += words * pool.element_size()
        return total

    def select(self, dim: int, index: torch.Tensor) -> PackedBlocks:
        """The records ``index`` (int64, ``[n]``) along ``dim`` (0: batch, 2: blocks), in order."""

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(dim, index.to(tensor.device))

        pools = {}
        for name, pool in self.pools.items():
            counts = self.counts[self.pool_counts[name]].long()
            starts = pick((counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)).flatten()
            taken = pick(counts).flatten()
            new_starts = taken.cumsum(0) - taken
            offset = torch.repeat_interleave(starts - new_starts, taken)
            pools[name] = pool[offset + torch.arange(offset.numel(), device=pool.device)]
        return replace(
            self,
            planes={name: pick(t) for name, t in self.planes.items()},
            pools=pools,
            counts={name: pick(t) for name, t in self.counts.items()},
        )

    def slice_blocks(self, start: int, stop: int) -> PackedBlocks:
        """Blocks ``start .. stop - 1``, as copies."""
        return self.select(2, torch.arange(start, stop))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedBlocks:
        """The same blocks with ``function`` applied to each tensor (a move to another device)."""
        return replace(
            self,
            planes={name: function(t) for name, t in self.planes.items()},
            pools={name: function(t) for name, t in self.pools.items()},
            counts={name: function(t) for name, t in self.counts.items()},
        )

    @staticmethod
    def cat(parts: Iterable[PackedBlocks]) -> PackedBlocks:
        """All blocks of ``parts`` in order; each part has the same batch, heads and layout."""
        parts = list(parts)
        first = parts[0]
        if len(parts) == 1:
            return first
        counts = {name: torch.cat([p.counts[name] for p in parts], 2) for name in first.counts}
        pools = {}
        for name in first.pools:
            # Row by row, each part's words in turn: a stable sort of the words by their row.
            key = first.pool_counts[name]
            words = [p.counts[key].flatten(0, 1).sum(1, dtype=torch.int64) for p in parts]
            rows = torch.arange(words[0].numel(), device=words[0].device)
            row_of_word = torch.cat([torch.repeat_interleave(rows, w) for w in words])
            order = torch.sort(row_of_word, stable=True).indices
            pools[name] = torch.cat([p.pools[name] for p in parts])[order]
        return replace(
            first,
            planes={name: torch.cat([p.planes[name] for p in parts], 2) for name in first.planes},
            pools=pools,
            counts=counts,
        )

    def check(
        self,
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]],
        pools: dict[str, torch.dtype],
    ) -> None:
        """Raises :class:`CorruptDataError` unless planes have the expected shape (behind the
        leading three) and dtype, and the pools exactly the words that the counts announce."""
        lead = self.lead_shape
        for name, (shape, dtype) in expected.items():
            found = self.planes.get(name)
            if found is None or found.dtype != dtype or tuple(found.shape) != (*lead, *shape):
                got = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise CorruptDataError(
                    f"packed array {name!r}: expected {dtype} {(*lead, *shape)}, got {got}"
                )
        for name, dtype in pools.items():
            pool, counts = self.pools.get(name), self.counts.get(self.pool_counts.get(name, ""))
            if (
                pool is None
                or counts is None
                or (pool.dtype, pool.dim()) != (dtype, 1)
                or (counts.dtype, tuple(counts.shape)) != (torch.int32, lead)
            ):
                raise CorruptDataError(
                    f"packed pool {name!r} is missing, or its words or counts have another type"
                )
            if bool((counts < 0).any()) or int(counts.sum(dtype=torch.int64)) != pool.numel():
                raise CorruptDataError(
                    f"packed pool {name!r} has {pool.numel()} words where its counts announce "
                    f"{int(counts.sum(dtype=torch.int64))}: the data is damaged"
                )


def check_version(what: str, version: int, newest: int) -> None:
    """Raises :class:`UnsupportedLayoutError` for a version that this release does not know."""
    if not 1 <= version <= newest:
        raise UnsupportedLayoutError(
            f"{what} version {version} is not supported: this release reads versions 1 to "
            f"{newest}. "
            "Install a newer hf_kvcodecs, or write the data again with this one."
        )
