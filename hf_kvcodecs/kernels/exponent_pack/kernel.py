"""Packing sealed blocks into the ``register`` word order, one program per block.

A program has one lane for each lane of the format: 512 of them, number ``((kind 2 + tile) 4 + warp)
32 + lane``, on 16 warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..register_words import rotate_right


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _lane_numbers(
    key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, lane, step, GROUPS: tl.constexpr
):
    """One step's numbers ``[512, GROUPS, khi, hi8, h]``: bits, code, whether it is a misfit, and
    the number's element index as patches have it."""
    lane = lane[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    khi = tl.arange(0, 2)[None, None, :, None, None]
    hi8 = tl.arange(0, 2)[None, None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, None, :]
    row = (lane // 32 % 4) * 16 + hi8 * 8 + (lane % 32) // 4
    column = 16 * step + khi * 8 + (lane % 4) * 2 + half
    values = (lane >= 256) & (group + khi + hi8 + half >= 0)
    token = (lane // 128 % 2) * 64 + tl.where(values, column, row)
    channel = 64 * group + tl.where(values, row, column)
    source = tl.where(
        values, value_ptr + token * stride_vt + channel, key_ptr + token * stride_kt + channel
    )
    x = tl.load(source).to(tl.int32) & 0xFFFF
    base = tl.load(bases_ptr + tl.where(values, 64 * GROUPS, 0) + channel).to(tl.int32)
    exponent = (x >> 7) & 0xFF
    code = exponent - base + 15
    zero = (x & 0x7FFF) == 0
    lowest = tl.where(values, 0, 1)
    misfit = (code < lowest) | (code > 15) | ((exponent == 0) & (lowest == 1))
    misfit = misfit & (values | (x & 0x7FFF != 0))
    code = tl.where((lowest == 1) & zero & (base > 0), 0, code)
    element = ((step * GROUPS + group) * 4 + hi8 + 2 * khi) * 2 + half
    return x, tl.where(misfit, 15, code), misfit.to(tl.int32), element


@triton.jit
def _step_words(
    key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, words, lane, step, GROUPS: tl.constexpr
):
    """Stores a step's low words; returns its nibble words ``[512, GROUPS]`` and each lane's number
    of misfits ``[512]``."""
    x, code, misfit, _ = _lane_numbers(
        key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, lane, step, GROUPS
    )
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 2)[None, :] * 8
    shift = shift[None, None, None, :, :]
    low = (((code & 1) << 7) | (x & 0x7F)) << shift
    low = tl.reduce(tl.reduce(low, 4, _or), 3, _or)  # [512, GROUPS, khi]
    word = tl.arange(0, GROUPS)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    chunk = (lane // 128 % 2 * 11 + lane // 256 * 4 + step) * (256 * GROUPS)
    tl.store(words + (chunk + lane % 128 * (2 * GROUPS))[:, None, None] + word, low)
    nibble = (((x >> 15) << 7) | (code >> 1)) << shift
    first, second = tl.split(tl.reduce(tl.reduce(nibble, 4, _or), 3, _or))
    return first | rotate_right(second, 28), tl.sum(tl.reshape(misfit, [512, 8 * GROUPS]), 1)


@triton.jit
def _all_words(
    key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, words, lane, GROUPS: tl.constexpr
):
    """Stores a slot's chunks; returns the escape words ``[512, GROUPS]`` and the numbers of
    misfits."""
    n0, c0 = _step_words(
        key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, words, lane, 0, GROUPS
    )
    n1, c1 = _step_words(
        key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, words, lane, 1, GROUPS
    )
    n2, c2 = _step_words(
        key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, words, lane, 2, GROUPS
    )
    n3, c3 = _step_words(
        key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, words, lane, 3, GROUPS
    )
    CHUNK: tl.constexpr = 256 * GROUPS
    C3: tl.constexpr = 0x44444444
    at = (lane // 128 % 2 * 11 + 8) * CHUNK + lane % 128 * (2 * GROUPS) + lane // 256 * GROUPS
    at = words + at[:, None] + tl.arange(0, GROUPS)[None, :]
    tl.store(at, (n0 & ~C3) | rotate_right(n3 & 0x11111111, 30))
    tl.store(at + CHUNK, (n1 & ~C3) | rotate_right(n3 & 0x22222222, 31))
    tl.store(at + 2 * CHUNK, (n2 & ~C3) | rotate_right(n3 & -0x77777778, 1))
    escapes = (n0 & C3) | rotate_right(n1 & C3, 31) | rotate_right(n2 & C3, 30)
    return escapes | rotate_right(n3 & C3, 29), c0 + c1 + c2 + c3


@triton.jit
def _per_warp(counts):
    """Counts of 512 lanes -> those of the lanes before each in its warp, and the warps' sums by
    kind, ``[8, 2]`` (tile and warp, kind)."""
    x = tl.reshape(counts, [2, 8, 32])
    before = tl.reshape(tl.cumsum(x, 2) - x, [512])
    return before, tl.trans(tl.sum(x, 2))


@triton.jit
def _to_lanes(x):
    """``[8]`` by tile and warp -> ``[512]``."""
    return tl.reshape(tl.broadcast_to(x[None, :, None], [2, 8, 32]), [512])


@triton.jit
def _store_list(start, quads, halves, stored, rank, total, lane, GROUPS: tl.constexpr):
    """Entries and positions of each lane's list (pointers to int32 ``[512]``); ``rank`` and
    ``total`` say where in its list a lane begins, and how many entries that has."""
    unit = tl.arange(0, 2 * GROUPS)[None, :]
    position = unit + (lane % 32 * (2 * GROUPS))[:, None]
    if GROUPS < 4:
        position += (lane // 256 * (64 * GROUPS))[:, None]
    entries = start.to(tl.pointer_type(tl.int16))[:, None]
    positions = (start + 2 * quads).to(tl.pointer_type(tl.uint8))[:, None]
    at = rank[:, None] + tl.cumsum(stored, 1) - stored
    last = at == total[:, None] - 1
    for more in range(4):  # the last one again, to the end of its quad
        mask = (stored != 0) & ((more == 0) | (last & (at + more < 4 * quads[:, None])))
        tl.store(entries + at + more, halves.to(tl.int16), mask=mask)
        tl.store(positions + at + more, position.to(tl.uint8), mask=mask)


@triton.jit
def _store_patches(
    key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, at, lane, GROUPS: tl.constexpr
):
    """Each lane's misfits, from ``at`` (pointers to int32 ``[512]``) on."""
    for step in range(4):
        x, _, misfit, element = _lane_numbers(
            key_ptr, value_ptr, stride_kt, stride_vt, bases_ptr, lane, step, GROUPS
        )
        patch = x | ((lane % 32)[:, None, None, None, None] << 16) | (element << 21)
        flat = tl.reshape(misfit, [512, 8 * GROUPS])
        before = tl.cumsum(flat, 1) - flat
        tl.store(at[:, None] + before, tl.reshape(patch, [512, 8 * GROUPS]), mask=flat != 0)
        at += tl.sum(flat, 1)


@triton.jit
def seal_block(
    key, value, stride_kt, stride_vt, row, number, bases, words_ptr, pool_ptr, raw_ptr, table_ptr,
    raw_list_ptr, raw_count_ptr, cursors_ptr, raw_free_ptr, table_blocks, pool_words, raw_slots,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr,
    PACKED: tl.constexpr, OWN_POOL: tl.constexpr,
):  # fmt: skip
    """The 128 tokens from ``key`` and ``value`` on (pointers to int16) into block ``number`` of
    ``row``: into its slot, or kept raw. ``bases`` has room for ``2 D`` bytes. Needs 16 warps.
    ``OWN_POOL``: the table and ``raw_free`` say where, and a slot ends in a pool of its own."""
    GROUPS: tl.constexpr = D // 64
    CHUNK: tl.constexpr = 256 * GROUPS
    offs_d = tl.arange(0, D)
    offs_t = tl.arange(0, 128)[:, None]
    entry_ptr = table_ptr + row.to(tl.int64) * table_blocks + number
    fits = False
    if PACKED:
        lane = tl.arange(0, 512)
        if OWN_POOL:
            slot = tl.load(entry_ptr).to(tl.int64)
        else:
            slot = row.to(tl.int64) * table_blocks + number
        words = words_ptr + slot * SLOT
        meta = words + 22 * CHUNK
        # ``bases``: in the channels' order, for this kernel alone.
        x = tl.load(key + offs_t * stride_kt + offs_d[None, :]).to(tl.int32)
        exponent = (x >> 7) & 0xFF
        highest_key = tl.max(tl.where(exponent == 255, 0, exponent), 0)
        x = tl.load(value + offs_t * stride_vt + offs_d[None, :]).to(tl.int32)
        exponent = (x >> 7) & 0xFF
        highest_value = tl.max(tl.where(exponent == 255, 0, exponent), 0)
        tl.store(bases + offs_d, highest_key.to(tl.uint8))
        tl.store(bases + D + offs_d, highest_value.to(tl.uint8))
        tl.debug_barrier()  # every lane reads bases that other lanes wrote
        word = tl.arange(0, D // 2)  # ((j G + u) 4 + i) 2 + khi
        channel = (word // 2 % (4 * GROUPS)) * 16 + (word % 2) * 8 + word // (8 * GROUPS) * 2
        low = tl.load(bases + channel).to(tl.int32)
        high = tl.load(bases + channel + 1).to(tl.int32)
        low = tl.where(low == 0, 0, (low + 112) << 7)
        high = tl.where(high == 0, 0, (high + 112) << 23)
        tl.store(meta + 16 + word, low | high)
        byte = (offs_d % 64 // 16 * 8 + offs_d % 8) * GROUPS + offs_d // 64  # w g u
        lane_bases = (meta + 16 + D // 2).to(tl.pointer_type(tl.uint8))
        tl.store(lane_bases + byte * 2 + offs_d % 16 // 8, highest_value.to(tl.uint8))

        escapes, misfits = _all_words(key, value, stride_kt, stride_vt, bases, words, lane, GROUPS)
        halves = tl.reshape(tl.join(escapes & 0xFFFF, (escapes >> 16) & 0xFFFF), [512, 2 * GROUPS])
        stored = (halves != 0xFFFF).to(tl.int32)
        rank, entries = _per_warp(tl.sum(stored, 1))
        key_entries, value_entries = tl.split(entries)  # [8] each, by tile and warp
        patch_rank, patches = _per_warp(misfits)
        key_patches, value_patches = tl.split(patches)
        if GROUPS < 4:  # one list: the values' entries behind the keys'
            first_entries = key_entries + value_entries
            second_entries = key_entries * 0
        else:
            first_entries = key_entries
            second_entries = value_entries
        first_quads = (first_entries + 3) // 4
        second_quads = (second_entries + 3) // 4
        sizes = key_patches + value_patches + 3 * (first_quads + second_quads)
        starts = tl.cumsum(sizes, 0) - sizes
        size = tl.sum(sizes, 0)
        most = tl.max(tl.maximum(key_patches, value_patches), 0)
        fits = (most <= 255) & (tl.max(highest_key, 0) <= 142)
        if OWN_POOL:
            fits = fits & (size <= OWN_POOL)
        else:
            fits = fits & (SLOT * 4 + size * 4 < 512 * HEAD_DIM)
        if fits:
            if OWN_POOL:
                place = (slot * SLOT + (SLOT - OWN_POOL)).to(tl.int32)
            else:
                place = tl.atomic_add(cursors_ptr, size)
                fits = place + size <= pool_words
            if fits:
                record = meta + 2 * tl.arange(0, 8)
                tl.store(record, place + starts)
                counts = key_patches | (value_patches << 8)
                tl.store(record + 1, counts | (first_quads << 16) | (second_quads << 24))
                behind = starts + key_patches + value_patches
                start = pool_ptr + place.to(tl.int64) + _to_lanes(behind)
                values = lane >= 256
                quads = _to_lanes(first_quads)
                total = _to_lanes(first_entries)
                if GROUPS < 4:
                    rank += tl.where(values, _to_lanes(key_entries), 0)
                else:
                    start += tl.where(values, 3 * quads, 0)
                    quads = tl.where(values, _to_lanes(second_quads), quads)
                    total = tl.where(values, _to_lanes(second_entries), total)
                _store_list(start, quads, halves, stored, rank, total, lane, GROUPS)
                if most > 0:
                    own = starts[None, :] + tl.join(starts * 0, key_patches).trans()
                    own = tl.broadcast_to(own[:, :, None], [2, 8, 32])
                    at = pool_ptr + place.to(tl.int64) + tl.reshape(own, [512]) + patch_rank
                    _store_patches(key, value, stride_kt, stride_vt, bases, at, lane, GROUPS)
                tl.store(entry_ptr, slot.to(tl.int32))
    if not fits:
        raw_slot = tl.atomic_add(cursors_ptr + 1, 1)
        if raw_slot < raw_slots:
            if OWN_POOL:
                raw_slot = tl.load(raw_free_ptr + raw_slot)
            raw = raw_ptr + raw_slot.to(tl.int64) * (256 * HEAD_DIM)
            mask_d = (offs_d < HEAD_DIM)[None, :]
            into = raw + offs_t * HEAD_DIM + offs_d[None, :]
            copied = tl.load(key + offs_t * stride_kt + offs_d[None, :], mask=mask_d, other=0)
            tl.store(into, copied, mask=mask_d)
            copied = tl.load(value + offs_t * stride_vt + offs_d[None, :], mask=mask_d, other=0)
            tl.store(into + 128 * HEAD_DIM, copied, mask=mask_d)
            tl.store(entry_ptr, -1 - raw_slot)
            listed = tl.atomic_add(raw_count_ptr + row, 1)
            tl.store(raw_list_ptr + row.to(tl.int64) * table_blocks + listed, number)
        else:
            tl.atomic_add(cursors_ptr + 2, 1)


@triton.jit(
    do_not_specialize=["first_block", "table_blocks", "pool_words", "raw_slots", "kv_heads"]
)
def _pack_kernel(
    key_ptr, value_ptr, words_ptr, pool_ptr, raw_ptr, table_ptr, raw_list_ptr, raw_count_ptr,
    cursors_ptr, raw_free_ptr, bases_ptr, first_block, table_blocks, pool_words, raw_slots,
    kv_heads, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr,
    PACKED: tl.constexpr, OWN_POOL: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(1)`` of row ``program_id(0)``."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    key = key_ptr + batch * stride_kb + head * stride_kh + block.to(tl.int64) * 128 * stride_kt
    value = value_ptr + batch * stride_vb + head * stride_vh + block.to(tl.int64) * 128 * stride_vt
    bases = bases_ptr + (row.to(tl.int64) * tl.num_programs(1) + block) * (2 * D)
    seal_block(
        key, value, stride_kt, stride_vt, row, first_block + block, bases, words_ptr, pool_ptr,
        raw_ptr, table_ptr, raw_list_ptr, raw_count_ptr, cursors_ptr, raw_free_ptr, table_blocks,
        pool_words, raw_slots, HEAD_DIM, D, SLOT, PACKED, OWN_POOL,
    )  # fmt: skip
