"""Keys and values of one layer of one cache, in the memory of a pool."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CacheMisuseError, PoolFullError
from ..kernels.exponent_pack import register_pack
from ..kernels.exponent_unpack import register_unpack
from ..kernels.packed_attention import packed_attention
from ..kernels.register_blocks import BLOCK_TOKENS, RegisterBlocks
from .fused import TAIL_TOKENS, FusedPair, in_place
from .layer import GAACLayer, GAACOptions, check_states
from .pool import RAW_SHARE, Holding, Lease, PoolLayer, Seat

RECORDS_AT = 88  # words of a slot before its records, per channel
COPIED_SLOTS = 64  # at a time: what is on its way takes memory twice


class PooledPair(FusedPair):
    """:class:`FusedPair` whose slots, raw slots and tail belong to a pool.

    Each row has its own places for its blocks; rows exchanged for others' (beams) share blocks that
    are sealed. A crop reopens only the block that it cuts.
    """

    @in_place
    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, seat: Seat, layer: PoolLayer
    ) -> None:
        batch, heads, _, head_dim = keys.shape
        pool = seat.pool
        expected = pool.kv_heads, pool.head_dim, pool.device
        if (heads, head_dim, keys.device) != expected:
            raise CacheMisuseError(
                f"keys: {heads} kv_heads of width {head_dim} on {keys.device}, but the pool was "
                f"made for {expected[0]} of width {expected[1]} on {expected[2]}. Make it with the "
                "config of this model, its device, and kv_heads= where heads are spread over GPUs"
            )
        self._begin(seat, layer, seat.lease(batch))

    def _begin(self, seat: Seat, layer: PoolLayer, lease: Lease) -> None:
        """No tokens yet."""
        pool = seat.pool
        self.tokens = self.epoch = 0
        self.broken = False
        self.seat, self.layer, self.lease = seat, layer, lease
        self.raws = Holding(layer.free_raw)
        self._offered: list[int] = []  # raw slots that the latest seal may have taken
        self._cursors: torch.Tensor | None = None
        self._settled: torch.cuda.Event | None = None
        lease.users.add(self)
        pool.used()
        pool.wait()
        first = lease.tails.numbers[0] if lease.rows else 0
        self.tail = layer.tails[first : first + lease.rows].transpose(0, 1)
        self._slots = lease.slots()
        zeros = layer.words.new_zeros
        self.blocks = RegisterBlocks(
            head_dim=pool.head_dim,
            words=layer.words,
            pool=layer.words.view(-1),
            raw=layer.raw,
            table=self._slots.clone(),
            raw_list=torch.zeros_like(self._slots),
            raw_count=zeros((lease.rows, pool.kv_heads)),
            cursors=zeros(3),
            raw_free=zeros(0),
        )

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the blocks that this cache holds in the pool, the part not yet used included
        (waits for the latest seal)."""
        self.settle()
        blocks = self.lease.blocks * self.lease.rows * self.tail.shape[2]
        raw = len(self.raws.numbers) * self.layer.raw[0].nbytes
        return blocks * (self.layer.words[0].nbytes + 8) + self.blocks.raw_count.nbytes + raw

    def _check_whole(self) -> None:
        super()._check_whole()
        self.seat.pool.used()  # each use comes by here

    def append(self, keys: torch.Tensor, values: torch.Tensor, seal: bool = True) -> FusedPair:
        """This pair with new tokens behind the others.

        Raises:
            CacheMisuseError: more than ``max_tokens``; nothing has changed.
            PoolFullError: the pool has no blocks for them; nothing has changed.
        """
        new_tokens = keys.shape[2]
        self.seat.ensure(self.lease, self.tokens + new_tokens, new_tokens)
        self._fit_tables()
        return super().append(keys, values, seal)

    @in_place
    def _fit_tables(self) -> None:
        """Tables as wide as the lease, which may have grown or shrunk."""
        slots = self.lease.slots()
        if slots is self._slots:
            return
        held, sealed = self.blocks, self.sealed_blocks
        table, raw_list = slots.clone(), torch.zeros_like(slots)
        table[:, :, :sealed] = held.table[:, :, :sealed]
        raw_list[:, :, :sealed] = held.raw_list[:, :, :sealed]
        held.table, held.raw_list, self._slots = table, raw_list, slots

    def _fit_tail(self, kept: int, needed: int, capacity: int) -> None:
        assert needed <= TAIL_TOKENS  # full blocks are always sealed

    def _seal(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Seals whole blocks, in places that the lease has for them."""
        held = self.blocks
        before, counts = held.blocks, held.raw_count.clone()
        most = keys.shape[0] * keys.shape[1] * (keys.shape[2] // BLOCK_TOKENS)
        rows = keys.shape[0] * keys.shape[1]
        offered = min(most, rows + int(RAW_SHARE * most))
        self.settle()
        while True:
            with self.seat.pool.lock:  # others settle this pair when they need raw slots
                self._offer(offered)
                found = len(self._offered)
                register_pack(keys, values, held)
                self._watch()
                if found >= most:  # whatever they hold: no need to look
                    return
                _, wanted = self.settle()
            if wanted <= found:
                return
            held.blocks = before
            held.raw_count.copy_(counts)
            held.table[:, :, before:] = self._slots[:, :, before:]
            self._give_back_unused()
            offered = wanted
            if self._free_raw(wanted) < wanted:
                self._refuse_raw(wanted)

    def _offer(self, count: int) -> None:
        """Takes up to ``count`` raw slots for the next blocks."""
        pool, free = self.seat.pool, self.layer.free_raw
        pool.wait()
        held = len(self.raws.numbers)
        free.take(min(count, self._free_raw(count)), self.raws)
        self._offered = self.raws.numbers[held:]
        numbers = torch.tensor(self._offered, dtype=torch.int32)
        self.blocks.raw_free = numbers.to(pool.device, non_blocking=True)
        self.blocks.cursors.zero_()
        self.layer.sealing.add(self)

    def _free_raw(self, wanted: int) -> int:
        """How many raw slots are free, those included that others have had offered for nothing."""
        if self.layer.free_raw.free < wanted:
            for pair in tuple(self.layer.sealing):
                pair.settle()
        return self.layer.free_raw.free

    def _refuse_raw(self, wanted: int) -> None:
        free = self.layer.free_raw
        raise PoolFullError(
            f"{wanted} blocks do not fit their slots and have to stay raw, and {free.free} of the "
            f"pool's {free.total} raw slots of this layer are free. These keys and values pack "
            "badly: make the pool with a larger raw_share, or wait until other caches are gone"
        )

    def settle(self) -> tuple[int, int]:
        """Waits for the latest seal, and gives back the raw slots that it did not take. Returns
        how many pool words (none) and raw slots were wanted."""
        with self.seat.pool.lock:
            if self._cursors is None or self not in self.layer.sealing:
                return 0, 0
            self.layer.sealing.discard(self)
            if self._settled is not None:
                self._settled.synchronize()
                self._settled = None
            wanted = int(self._cursors[1])
            unused, self._offered = self._offered[wanted:], self._offered[:wanted]
            self.layer.free_raw.give_back(unused, self.raws)
            return 0, wanted

    def _give_back_unused(self) -> None:
        """Gives back raw slots that no table names."""
        table = self.blocks.table
        used = set((-1 - table[table < 0]).tolist())
        unused = [number for number in self.raws.numbers if number not in used]
        self.layer.free_raw.give_back(unused, self.raws)

    @in_place
    def crop(self, tokens: int, seal: bool = True) -> FusedPair:
        """The first ``tokens`` tokens; a sealed block that the cut falls into joins the tail."""
        self._check_whole()
        self.settle()
        self._fit_tables()
        self.epoch += 1
        keep, rest = divmod(tokens, BLOCK_TOKENS)
        if keep < self.sealed_blocks:
            if rest:
                keys, values = register_unpack(self.blocks, keep, keep + 1)
                self._write(0, keys[:, :, :rest], values[:, :, :rest])
            held = self.blocks
            held.blocks = keep
            held.table[:, :, keep:] = self._slots[:, :, keep:]
            raw = held.table[:, :, :keep] < 0
            held.raw_count = raw.sum(-1, dtype=torch.int32)
            held.raw_list[:, :, :keep] = raw.logical_not().int().argsort(dim=-1, stable=True)
            self._give_back_unused()
        self.tokens = tokens
        self.seat.fit(self.lease)
        return self

    @in_place
    def select_batch(self, index: torch.Tensor) -> FusedPair:
        """Rows ``index`` (int64) of the batch, in that order, repeats allowed. As many as before
        share their sealed blocks; another number is admitted anew and copied.

        Raises:
            PoolFullError: no room for another number of rows beside these.
        """
        self._check_whole()
        self.settle()
        index = index.to(self.device)
        if len(index) != self.batch:
            return self._copied(self.seat, self.seat.lease(len(index), self.lease.blocks), index)
        self.epoch += 1
        held, sealed, tail = self.blocks, self.sealed_blocks, self.tail_tokens
        for table in (held.table, held.raw_list):
            table[:, :, :sealed] = table.index_select(0, index)[:, :, :sealed]
        held.raw_count = held.raw_count.index_select(0, index)
        self.tail[:, :, :, :tail] = self.tail[:, :, :, :tail].index_select(1, index)
        return self

    @in_place
    def __deepcopy__(self, memo: dict[int, Any]) -> FusedPair:
        seat = copy.deepcopy(self.seat, memo)
        every = torch.arange(self.batch, device=self.device)
        return self._copied(seat, seat.lease(self.batch, self.lease.blocks), every)

    def _copied(self, seat: Seat, lease: Lease, index: torch.Tensor) -> PooledPair:
        """Rows ``index`` in places of ``lease``."""
        self._check_whole()
        self.settle()
        twin = PooledPair.__new__(PooledPair)
        twin._begin(seat, self.layer, lease)
        sealed, tail, layer = self.sealed_blocks, self.tail_tokens, self.layer
        twin.tail[:, :, :, :tail] = self.tail[:, :, :, :tail].index_select(1, index)
        source = self.blocks.table[:, :, :sealed].index_select(0, index)
        place, raw = twin.blocks.table[:, :, :sealed], source < 0
        records = RECORDS_AT * self.blocks.head_dim
        old, new = source[~raw], place[~raw]
        for a, b in zip(old.split(COPIED_SLOTS), new.split(COPIED_SLOTS), strict=True):
            words = layer.words.index_select(0, a)
            # Where in the whole pool the parts of each tile and warp begin.
            starts = words[:, records : records + 16 : 2]
            starts += ((b - a) * layer.words.shape[1])[:, None]
            layer.words.index_copy_(0, b.long(), words)
        found = -1 - source[raw].long()
        if not layer.free_raw.take(len(found), twin.raws):
            self._refuse_raw(len(found))
        fresh = torch.tensor(twin.raws.numbers, dtype=torch.int64, device=self.device)
        layer.raw.index_copy_(0, fresh, layer.raw.index_select(0, found))
        place[raw] = (-1 - fresh).int()
        twin.blocks.raw_count = self.blocks.raw_count.index_select(0, index)
        twin.blocks.raw_list[:, :, :sealed] = self.blocks.raw_list.index_select(0, index)[
            :, :, :sealed
        ]
        twin.blocks.blocks, twin.tokens = sealed, self.tokens
        return twin


class PooledLayer(GAACLayer):
    """:class:`GAACLayer` in a pool."""

    def __init__(self, seat: Seat, number: int) -> None:
        super().__init__(GAACOptions())
        self._seat, self._memory = seat, seat.pool.layers[number]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`GAACLayer.update`.

        Raises:
            CacheMisuseError: also for states that no fused kernel takes.
            PoolFullError: no room in the pool.
        """
        check_states(key_states, value_states, self._pair)
        if not self.options.fuses(key_states, value_states):
            raise CacheMisuseError(
                f"keys: {key_states.dtype} of width {key_states.shape[3]} on {key_states.device}; "
                "a pool takes bf16 keys and values of one shape on a GPU. Load the model in bf16, "
                "or use GAACCache() without a pool"
            )
        return self._update_fused(key_states, value_states)

    def _empty_fused(self, keys: torch.Tensor, values: torch.Tensor) -> FusedPair:
        return PooledPair(keys, values, self._seat, self._memory)

    def reset(self) -> None:
        super().reset()
        self._seat.give_back()


def attend_together(
    pairs: Sequence[PooledPair], q: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """One call of :func:`packed_attention` for sequences of any lengths in one layer of one pool.

    Args:
        pairs: the sequences; their rows in this order make the batch.
        q: bf16 ``[rows, q_heads, q_tokens, head_dim]``, the newest tokens of each.
        scale: ``head_dim ** -0.5`` if None.

    Returns:
        bf16 like ``q``.

    Tails at equal distances in the pool (one sequence; neighbours) are read in place, others are
    copied together first.
    """
    first = pairs[0]
    for pair in pairs:
        pair._check_whole()
        if pair.layer is not first.layer:
            raise ValueError("pairs: expected one layer of one pool, got several")
    width = max(pair.blocks.table.shape[2] for pair in pairs)

    def together(name: str) -> torch.Tensor:
        tables = (getattr(pair.blocks, name) for pair in pairs)
        pad = torch.nn.functional.pad
        return torch.cat([pad(table, (0, width - table.shape[2])) for table in tables])

    held = first.blocks
    blocks = RegisterBlocks(
        head_dim=held.head_dim, words=held.words, pool=held.pool, raw=held.raw,
        table=together("table"), raw_list=together("raw_list"),
        raw_count=torch.cat([pair.blocks.raw_count for pair in pairs]), cursors=held.cursors,
    )  # fmt: skip
    counts = [(pair.sealed_blocks, pair.tokens) for pair in pairs for _ in range(pair.batch)]
    sealed, lengths = torch.tensor(counts, dtype=torch.int32).t().to(q.device)
    tails = _tails(first.layer, [row for pair in pairs for row in pair.lease.tails.numbers])
    return packed_attention(
        q, blocks, *tails, scale=scale, sealed=sealed, lengths=lengths,
        sealed_visible=q.shape[2] == 1,
    )  # fmt: skip


def _tails(layer: PoolLayer, rows: list[int]) -> torch.Tensor:
    """bf16 ``[2, rows, kv_heads, 256, head_dim]``."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if step > 0 and rows == list(range(rows[0], rows[-1] + 1, step)):
        return layer.tails[rows[0] : rows[-1] + 1 : step].transpose(0, 1)
    index = torch.tensor(rows, device=layer.tails.device)
    return layer.tails.index_select(0, index).transpose(0, 1)
