"""Sealed bf16 blocks in the ``register`` word order, which fused attention reads as it is.

The numbers are those of the exponent code of :mod:`hf_kvcodecs.layouts` (bf16, 4-bit window, 3
fixed bits, bases per channel and block of 128 tokens), with keys and values of one (row, kv head,
block) in one *slot*, and their words in the order in which the lanes of four warps feed them to
the matrix unit. Version 1:

- Keys: ``c = exponent - base + 15`` in 1 .. 15, base the channel's largest finite exponent field; 0
  for +0 and -0, but 15 in a channel of zeros alone (base 0), whose factor is 0. Any other number is
  a *patch*. A block with a base above 142 (2**16 and more) is kept raw.
- Values: ``c`` in 0 .. 15; any other number is a patch.

In the words a patched number has ``c = 15``.

A head of ``D`` channels has ``G = D / 64`` groups. A block is two tiles of 64 tokens. Lane ``32 w +
4 g + j`` of 128 holds, for group ``u``, step ``i`` (0 .. 3) and register ``r = hi8 + 2 khi``, two
numbers ``h``:

- keys: token ``16 w + 8 hi8 + g``, channel ``64 u + 16 i + 8 khi + 2 j + h``;
- values: channel ``64 u + 16 w + 8 hi8 + g``, token ``16 i + 8 khi + 2 j + h``.

A slot is int32 words:

- per tile 11 chunks of ``[128 lanes, 2 G]`` words. Chunks 0-3: the keys' low words of step ``i``,
  word ``2 u + khi``: byte ``2 hi8 + h`` is ``(c & 1) << 7 | mantissa``. Chunks 4-7: the values'.
  Chunks 8-10: words ``H_0 .. H_2`` of each group, the keys' first, made of the four steps' *nibble
  words* ``N_i``. In ``N_i`` byte ``b = 2 hi8 + h`` has the sign in bit 7 and ``c >> 1`` in bits 0-2
  for ``khi = 0``; the same pattern for ``khi = 1`` is rotated left by 4 in the 32-bit word. Code
  bit 3 (mask ``0x44444444``) is taken out; ``H_i`` is the rest of ``N_i`` with, in the freed bits,
  ``rotl(N_3 & 0x11111111, 2)``, ``rotl(N_3 & 0x22222222, 1)``, ``rotr(N_3 & 0x88888888, 1)``.
- records, 16 words: for each tile and warp where its part of the pool begins (in words), then
  counts: key patches in bits 0-7, value patches in 8-15, the *quads* of its lists in 16-23 and
  24-31.
- key factors, D/2 words: ``2**(base - 15)`` as bf16 (0 where the base is 0), channels in the
  lanes' order: word ``((j G + u) 4 + i) 2 + khi`` holds those of the two numbers ``h``.
- value bases, D bytes: byte ``((w 8 + g) G + u) 2 + hi8``.

The *escape word* of a kind and group is the code bits 3 of its four steps, step ``i``'s rotated
left by ``i``. Its 16-bit halves that are all ones are not stored; the others are *entries*, with a
*position*: ``2 u + half``, plus ``2 G`` times the lane, plus ``64 G`` for values.

A warp's part of the pool is its key patches, its value patches, then its list of entries in the
order of their positions; heads of 256 channels have two lists, the keys' and the values', and
positions start from 0 in each. A list's last entry is repeated until four divide their number: a
quad. First come the entries, 16 bits each, then the positions, 8 bits each. A patch is a word: the
number in bits 0-15, the lane in 16-20, ``((i G + u) 4 + r) 2 + h`` above.

A block that does not fit (more than 255 patches of a kind, tile and warp; no room in the pool; more
bytes than raw) is kept raw: bf16 ``[2, 128, D]``. ``table`` has the slot of each block, or ``-1 -
raw slot``.

Memory is *paged* where many sequences share it: a slot is longer then and ends in a pool of its
own, and who seals a block says beforehand in ``table`` which slot it gets, and in ``raw_free``
which raw slots may be used. Readers need not know.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..errors import KVCodecsError

BLOCK_TOKENS = 128
TILE_TOKENS = 64
PATCHES = 255
KEY_BASE_LIMIT = 142  # the factor 2**(base - 15) has to be a bf16 number
HEAD_DIMS = (64, 128, 256)
MAX_POOL_WORDS = 1 << 30
POOL_SHARE = 0.5  # pool words reserved per block, of the most that escapes can take


def slot_words(head_dim: int) -> int:
    """int32 words of one slot."""
    groups = head_dim // 64
    return 22 * 256 * groups + 16 + head_dim // 2 + head_dim // 4


@dataclass(slots=True, kw_only=True)
class RegisterBlocks:
    """Memory for the sealed blocks of one layer, filled in place; see the module for the format.

    Attributes:
        head_dim: channels of a head.
        words: int32 ``[slots, slot_words(head_dim)]``; None where blocks cannot be packed (head_dim
            not in ``HEAD_DIMS``): then every block is raw.
        pool: int32 ``[n]``.
        raw: int16 ``[raw_slots, 2, 128, head_dim]``.
        table: int32 ``[batch, kv_heads, blocks]``, the slot of each block or ``-1 - raw slot``.
        raw_list: int32 like ``table``: the numbers of a row's raw blocks, in no order.
        raw_count: int32 ``[batch, kv_heads]``: how many of ``raw_list`` count.
        cursors: int32 ``[3]``: pool words and raw slots taken, blocks that found no room at all.
        blocks: how many blocks of every row are sealed.
        raw_free: int32 ``[n]``, in paged memory alone: raw slots that may be taken, in this order;
            ``cursors[1]`` counts them. ``pool`` is ``words``, flat, and unsealed blocks have slots
            in ``table``.
    """

    head_dim: int
    words: torch.Tensor
    pool: torch.Tensor
    raw: torch.Tensor
    table: torch.Tensor
    raw_list: torch.Tensor
    raw_count: torch.Tensor
    cursors: torch.Tensor
    blocks: int = 0
    raw_free: torch.Tensor | None = None

    @staticmethod
    def allocate(
        batch: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        device: torch.device | str,
        *,
        pool_words: int | None = None,
        raw_slots: int | None = None,
    ) -> RegisterBlocks:
        """Empty memory for ``blocks`` blocks a row.

        Args:
            pool_words: 32-bit words for escapes and patches; by default half of the most that
                escapes can take, about twice what real caches need.
            raw_slots: blocks that may stay raw; by default a 16th of all, all where none can be
                packed. :meth:`check` tells when they did not suffice.

        Raises:
            ValueError: ``pool_words`` beyond what the format can address.
        """
        records = batch * kv_heads * blocks
        packable = head_dim in HEAD_DIMS
        slots = records if packable else 0
        if pool_words is None:
            pool_words = int(slots * POOL_SHARE * BLOCK_TOKENS * 2 * head_dim / 32) + 64
        if raw_slots is None:
            raw_slots = max(records // 16, min(records, 64)) if packable else records

        _check_pool(pool_words)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return RegisterBlocks(
            head_dim=head_dim,
            # Zeros: attention runs over a raw block's unused slot, which must hold finite numbers.
            words=zeros(max(slots, 1), slot_words(head_dim) if packable else 1),
            pool=torch.empty(max(pool_words, 2), dtype=torch.int32, device=device),
            raw=torch.empty(
                (max(raw_slots, 1), 2, BLOCK_TOKENS, head_dim), dtype=torch.int16, device=device
            ),
            table=zeros(batch, kv_heads, blocks),
            raw_list=zeros(batch, kv_heads, blocks),
            raw_count=zeros(batch, kv_heads),
            cursors=zeros(3),
        )

    def resized(
        self,
        *,
        blocks: int | None = None,
        pool_words: int | None = None,
        raw_slots: int | None = None,
    ) -> RegisterBlocks:
        """The same sealed blocks in memory of other sizes; what keeps its size is shared with this
        object, which must not be used any more. No size may fall below what is used."""
        result = replace(self)
        if blocks is not None and blocks != self.table.shape[2]:
            result._gather(self, self.table, self.raw_list, blocks)
        if pool_words is not None and pool_words != self.pool.numel():
            _check_pool(pool_words)
            result.pool = _resized(self.pool, max(pool_words, 2))
        if raw_slots is not None and raw_slots != self.raw.shape[0]:
            result.raw = _resized(self.raw, max(raw_slots, 1))
        return result

    def rows(self, index: torch.Tensor) -> RegisterBlocks:
        """Rows ``index`` (int64 ``[n]``, repeats allowed) of the batch. Sealed blocks never change,
        so that as many rows as before share this object's memory; it must not be used any more."""
        result = replace(self, raw_count=self.raw_count.index_select(0, index))
        table, raw_list = (x.index_select(0, index) for x in (self.table, self.raw_list))
        if len(index) == self.table.shape[0]:
            result.table, result.raw_list = table, raw_list
        else:
            result._gather(self, table, raw_list, self.table.shape[2])
        return result

    def clone(self) -> RegisterBlocks:
        """An independent copy."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: Any = {k: v.clone() for k, v in held.items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors)

    def _gather(
        self, source: RegisterBlocks, table: torch.Tensor, raw_list: torch.Tensor, blocks: int
    ) -> None:
        """Takes the blocks that ``table`` ``[batch, kv_heads, n]`` names in ``source``, with places
        for ``blocks`` a row."""
        batch, heads, capacity = table.shape
        kept = min(self.blocks, capacity)
        slots = batch * heads * blocks if self.packable else 0
        self.words = source.words.new_zeros((max(slots, 1), source.words.shape[1]))
        entries = table.new_zeros((batch, heads, blocks))
        places = torch.arange(batch * heads * blocks, device=table.device, dtype=table.dtype)
        found = table[:, :, :kept]
        entries[:, :, :kept] = torch.where(found < 0, found, places.view_as(entries)[:, :, :kept])
        if slots and kept:
            old = found.clamp(min=0).flatten(0, 1).long()
            for row in range(batch * heads):  # row by row: no second copy of them all
                part = self.words[row * blocks : row * blocks + kept]
                torch.index_select(source.words, 0, old[row], out=part)
        self.table = entries
        self.raw_list = raw_list.new_zeros((batch, heads, blocks))
        self.raw_list[:, :, :kept] = raw_list[:, :, :kept]

    @property
    def packable(self) -> bool:
        """Whether blocks of this head_dim have a packed form."""
        return self.head_dim in HEAD_DIMS

    @property
    def own_pool_words(self) -> int:
        """Words at the end of each slot for its escapes and patches, 0 where memory is not
        paged."""
        paged = self.raw_free is not None and self.packable
        return self.words.shape[1] - slot_words(self.head_dim) if paged else 0

    @property
    def raw_room(self) -> int:
        """Raw slots that may be taken, those that are taken included."""
        return self.raw.shape[0] if self.raw_free is None else self.raw_free.numel()

    @property
    def nbytes(self) -> int:
        """Bytes that the sealed blocks take, tables included (waits for the device)."""
        used = self.cursors.tolist()
        used[0] = min(used[0], self.pool.numel())  # blocks without room took none
        used[1] = min(used[1], self.raw.shape[0])
        records = self.table.shape[0] * self.table.shape[1] * self.blocks
        packed = (records - used[1]) * self.words.shape[1] * 4 if self.packable else 0
        raw = used[1] * self.raw[0].numel() * 2
        return int(packed + raw + 4 * (used[0] + records + self.raw_count.numel()))

    def check(self) -> None:
        """Raises :class:`KVCodecsError` if a block found room neither packed nor raw (waits for
        the device). Its tokens are lost here: keep the dense ones until this has passed."""
        lost = int(self.cursors[2])
        if lost:
            raise KVCodecsError(
                f"{lost} of {self.table.numel()} blocks neither fit their slots nor the "
                f"{self.raw.shape[0]} raw ones. Allocate with more raw_slots (or pool_words), and "
                "pack again."
            )


def _resized(memory: torch.Tensor, size: int) -> torch.Tensor:
    """The first ``size`` entries of ``memory``, with more behind them if there are fewer."""
    result = memory.new_empty((size, *memory.shape[1:]))
    kept = min(size, memory.shape[0])
    result[:kept] = memory[:kept]
    return result


def _check_pool(pool_words: int) -> None:
    if pool_words >= MAX_POOL_WORDS:
        raise ValueError(
            f"pool_words: {pool_words}; expected fewer than {MAX_POOL_WORDS} (4 GiB). Use one "
            "RegisterBlocks per layer and fewer rows in each"
        )
