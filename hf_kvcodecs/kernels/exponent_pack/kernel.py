"""Packing sealed blocks into the ``register`` word order, one program per block."""

from __future__ import annotations

import triton
import triton.language as tl

from ..register_words import population_count, rotate_right


@triton.jit
def _place(lane, step, KEYS: tl.constexpr, GROUPS: tl.constexpr):
    """Token in the tile and channel of each number of one step: ``[128, GROUPS, khi, hi8, h]``."""
    lane = lane[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    khi = tl.arange(0, 2)[None, None, :, None, None]
    hi8 = tl.arange(0, 2)[None, None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, None, :]
    row = (lane // 32) * 16 + hi8 * 8 + (lane % 32) // 4 + 0 * (group + khi + half)
    column = 16 * step + khi * 8 + (lane % 4) * 2 + half + 0 * (group + hi8)
    if KEYS:
        return row, 64 * group + column
    else:
        return column, 64 * group + row


@triton.jit
def _load_numbers(
    src_ptr, stride_t, base_ptr, lane, tile, step,
    KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Bits, code and misfit mask of one step's numbers; ``src_ptr`` points at the block (int16)."""
    token, channel = _place(lane, step, KEYS, GROUPS)
    x = tl.load(src_ptr + (tile * 64 + token) * stride_t + channel).to(tl.int32) & 0xFFFF
    base = tl.load(base_ptr + channel).to(tl.int32)
    exponent = (x >> 7) & 0xFF
    code = exponent - base + 15
    misfit = (code < 0) | (code > 15)
    if KEYS:
        zero = (x & 0x7FFF) == 0
        misfit = (misfit | (code < 1) | (exponent == 0)) & (x & 0x7FFF != 0)
        code = tl.where(zero & (base > 0), 0, code)
    return x, tl.where(misfit, 15, code), misfit


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _or3(x):
    """The bits of the last two axes together."""
    return tl.reduce(tl.reduce(x, 4, _or), 3, _or)


@triton.jit
def _step_words(
    src_ptr, stride_t, base_ptr, low_ptr, lane, tile, step,
    KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores a step's low words; returns its nibble words ``[128, GROUPS]`` and each lane's number
    of misfits ``[128]``."""
    x, code, misfit = _load_numbers(src_ptr, stride_t, base_ptr, lane, tile, step, KEYS, GROUPS)
    shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 2)[None, :] * 8
    shift = shift[None, None, None, :, :]
    low = _or3((((code & 1) << 7) | (x & 0x7F)) << shift)  # [128, GROUPS, khi]
    group = tl.arange(0, GROUPS)[None, :, None]
    khi = tl.arange(0, 2)[None, None, :]
    tl.store(low_ptr + lane[:, None, None] * (2 * GROUPS) + group * 2 + khi, low)
    nibble = _or3((((x >> 15) << 7) | (code >> 1)) << shift)
    first, second = tl.split(nibble)
    count = tl.sum(tl.sum(tl.sum(tl.sum(misfit.to(tl.int32), 4), 3), 2), 1)
    return first | rotate_right(second, 28), count


@triton.jit
def _kind_words(
    src_ptr, stride_t, base_ptr, tile_ptr, lane, tile,
    KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores one kind's words of a tile; returns its escape words ``[128, GROUPS]`` and each lane's
    number of misfits."""
    CHUNK: tl.constexpr = 256 * GROUPS
    low = tile_ptr if KEYS else tile_ptr + 4 * CHUNK
    n0, c0 = _step_words(src_ptr, stride_t, base_ptr, low, lane, tile, 0, KEYS, GROUPS)
    n1, c1 = _step_words(src_ptr, stride_t, base_ptr, low + CHUNK, lane, tile, 1, KEYS, GROUPS)
    n2, c2 = _step_words(src_ptr, stride_t, base_ptr, low + 2 * CHUNK, lane, tile, 2, KEYS, GROUPS)
    n3, c3 = _step_words(src_ptr, stride_t, base_ptr, low + 3 * CHUNK, lane, tile, 3, KEYS, GROUPS)
    C3: tl.constexpr = 0x44444444
    escapes = (n0 & C3) | rotate_right(n1 & C3, 31) | rotate_right(n2 & C3, 30)
    escapes = escapes | rotate_right(n3 & C3, 29)
    group = tl.arange(0, GROUPS)[None, :]
    if not KEYS:
        group += GROUPS
    at = tile_ptr + 8 * CHUNK + lane[:, None] * (2 * GROUPS) + group
    tl.store(at, (n0 & ~C3) | rotate_right(n3 & 0x11111111, 30))
    tl.store(at + CHUNK, (n1 & ~C3) | rotate_right(n3 & 0x22222222, 31))
    tl.store(at + 2 * CHUNK, (n2 & ~C3) | rotate_right(n3 & -0x77777778, 1))
    return escapes, c0 + c1 + c2 + c3


@triton.jit
def _tile_words(
    key_ptr, value_ptr, stride_kt, stride_vt, key_base_ptr, value_base_ptr, tile_ptr, lane, tile,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores a tile's words; returns the escapes' halves ``[128, 4 GROUPS]``, the lanes' flags, how
    many flags, key misfits and value misfits each lane has."""
    keys, key_misfits = _kind_words(
        key_ptr, stride_kt, key_base_ptr, tile_ptr, lane, tile, True, GROUPS
    )
    values, value_misfits = _kind_words(
        value_ptr, stride_vt, value_base_ptr, tile_ptr, lane, tile, False, GROUPS
    )
    words = tl.join(keys, values)  # [128, GROUPS, kind]
    words = tl.reshape(tl.permute(words, (0, 2, 1)), [128, 2 * GROUPS])
    halves = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [128, 4 * GROUPS])
    unit = tl.arange(0, 4 * GROUPS)[None, :]
    flags = tl.sum((halves != 0xFFFF).to(tl.int32) << unit, 1)
    return halves, flags, population_count(flags), key_misfits, value_misfits


@triton.jit
def _store_patches(
    src_ptr, stride_t, base_ptr, pool_ptr, lane, tile, starts, counts,
    KEYS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    per_warp = tl.reshape(counts, [4, 32])
    rank = starts + tl.reshape(tl.cumsum(per_warp, 1) - per_warp, [128])
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    khi = tl.arange(0, 2)[None, None, :, None, None]
    hi8 = tl.arange(0, 2)[None, None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, None, :]
    for step in range(4):
        x, _, misfit = _load_numbers(src_ptr, stride_t, base_ptr, lane, tile, step, KEYS, GROUPS)
        flat = tl.reshape(misfit.to(tl.int32), [128, 8 * GROUPS])
        at = rank[:, None] + tl.cumsum(flat, 1) - flat
        element = ((step * GROUPS + group) * 4 + hi8 + 2 * khi) * 2 + half
        word = x | ((lane % 32)[:, None, None, None, None] << 16) | (element << 21)
        tl.store(pool_ptr + at, tl.reshape(word, [128, 8 * GROUPS]), mask=flat != 0)
        rank += tl.sum(flat, 1)


@triton.jit
def _store_escapes(pool_ptr, halves, counts, starts, GROUPS: tl.constexpr):
    """Each lane's flagged halves behind those of the lanes before it; ``starts`` in halves."""
    per_warp = tl.reshape(counts, [4, 32])
    before = tl.reshape(tl.cumsum(per_warp, 1) - per_warp, [128])
    stored = (halves != 0xFFFF).to(tl.int32)
    at = (starts + before)[:, None] + tl.cumsum(stored, 1) - stored
    tl.store(pool_ptr + at, halves.to(tl.int16), mask=stored != 0)


@triton.jit
def _layout_tile(place, flag_counts, key_misfits, value_misfits):
    """Where each warp's part of the pool begins and its key and value patches, per lane; then the
    place behind the tile and the most patches of a kind."""
    escapes = tl.sum(tl.reshape(flag_counts, [4, 32]), 1)
    keys = tl.sum(tl.reshape(key_misfits, [4, 32]), 1)
    values = tl.sum(tl.reshape(value_misfits, [4, 32]), 1)
    size = keys + values + (escapes + 1) // 2  # [4]
    start = place + tl.cumsum(size, 0) - size
    starts = tl.reshape(tl.broadcast_to(start[:, None], [4, 32]), [128])
    keys_of_lane = tl.reshape(tl.broadcast_to(keys[:, None], [4, 32]), [128])
    values_of_lane = tl.reshape(tl.broadcast_to(values[:, None], [4, 32]), [128])
    most = tl.max(tl.maximum(keys, values), 0)
    return starts, keys_of_lane, values_of_lane, place + tl.sum(size, 0), most


@triton.jit
def _store_padding(pool_ptr, behind, flag_counts, lane):
    """All ones behind an odd number of escapes, so that a pool's bytes depend on its numbers
    alone."""
    per_warp = tl.reshape(flag_counts, [4, 32])
    total = tl.reshape(tl.broadcast_to(tl.sum(per_warp, 1)[:, None], [4, 32]), [128])
    at = behind * 2 + total
    tl.store(pool_ptr + at, tl.full([128], -1, tl.int16), mask=(lane % 32 == 0) & (total % 2 == 1))


@triton.jit(
    do_not_specialize=["first_block", "table_blocks", "pool_words", "raw_slots", "kv_heads"]
)
def _pack_kernel(
    key_ptr, value_ptr, words_ptr, pool_ptr, raw_ptr, table_ptr, raw_list_ptr, raw_count_ptr,
    cursors_ptr, bases_ptr, first_block, table_blocks, pool_words, raw_slots, kv_heads,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(1)`` of row ``program_id(0)``: into its slot, or kept raw."""
    GROUPS: tl.constexpr = D // 64
    CHUNK: tl.constexpr = 256 * GROUPS
    row = tl.program_id(0)
    block = tl.program_id(1)
    lane = tl.arange(0, 128)
    offs_d = tl.arange(0, D)
    batch = (row // kv_heads).to(tl.int64)
    head = (row % kv_heads).to(tl.int64)
    key = key_ptr + batch * stride_kb + head * stride_kh + block.to(tl.int64) * 128 * stride_kt
    value = value_ptr + batch * stride_vb + head * stride_vh + block.to(tl.int64) * 128 * stride_vt
    number = first_block + block
    entry_ptr = table_ptr + row.to(tl.int64) * table_blocks + number
    fits = False
    if PACKED:
        slot = row.to(tl.int64) * table_blocks + number
        words = words_ptr + slot * SLOT
        meta = words + 22 * CHUNK
        # Bases in the channels' order, for this kernel alone.
        key_bases = bases_ptr + (row.to(tl.int64) * tl.num_programs(1) + block) * (2 * D)
        value_bases = key_bases + D
        highest_key = tl.zeros([D], tl.int32)
        highest_value = tl.zeros([D], tl.int32)
        for part in range(4):
            offs_t = part * 32 + tl.arange(0, 32)
            x = tl.load(key + offs_t[:, None] * stride_kt + offs_d[None, :]).to(tl.int32)
            exponent = (x >> 7) & 0xFF
            highest_key = tl.maximum(highest_key, tl.max(tl.where(exponent == 255, 0, exponent), 0))
            x = tl.load(value + offs_t[:, None] * stride_vt + offs_d[None, :]).to(tl.int32)
            exponent = (x >> 7) & 0xFF
            highest_value = tl.maximum(
                highest_value, tl.max(tl.where(exponent == 255, 0, exponent), 0)
            )
        tl.store(key_bases + offs_d, highest_key.to(tl.uint8))
        tl.store(value_bases + offs_d, highest_value.to(tl.uint8))
        tl.debug_barrier()  # every lane reads bases that other lanes wrote
        word = tl.arange(0, D // 2)  # ((j G + u) 4 + i) 2 + khi
        channel = (word // 2 % (4 * GROUPS)) * 16 + (word % 2) * 8 + word // (8 * GROUPS) * 2
        low = tl.load(key_bases + channel).to(tl.int32)
        high = tl.load(key_bases + channel + 1).to(tl.int32)
        low = tl.where(low == 0, 0, (low + 112) << 7)
        high = tl.where(high == 0, 0, (high + 112) << 23)
        tl.store(meta + 32 * GROUPS + 16 + word, low | high)
        byte = (offs_d % 64 // 16 * 8 + offs_d % 8) * GROUPS + offs_d // 64  # w g u
        lane_bases = (meta + 32 * GROUPS + 16 + D // 2).to(tl.pointer_type(tl.uint8))
        tl.store(lane_bases + byte * 2 + offs_d % 16 // 8, highest_value.to(tl.uint8))
        halves0 = tl.zeros([128, 4 * GROUPS], tl.int32)
        halves1 = halves0
        flags = tl.zeros([128], tl.int32)
        flags0 = flags  # how many, by lane and tile
        flags1 = flags
        keys0 = flags  # misfits
        keys1 = flags
        values0 = flags
        values1 = flags
        for tile in range(2):
            halves, lane_flags, count, key_misfits, value_misfits = _tile_words(
                key, value, stride_kt, stride_vt, key_bases, value_bases,
                words + tile * (11 * CHUNK), lane, tile, GROUPS,
            )  # fmt: skip
            flags |= lane_flags << (4 * GROUPS * tile)
            halves0 = tl.where(tile == 0, halves, halves0)
            flags0 = tl.where(tile == 0, count, flags0)
            keys0 = tl.where(tile == 0, key_misfits, keys0)
            values0 = tl.where(tile == 0, value_misfits, values0)
            halves1 = halves
            flags1 = count
            keys1 = key_misfits
            values1 = value_misfits
        starts0, kp0, vp0, middle, most0 = _layout_tile(0, flags0, keys0, values0)
        starts1, kp1, vp1, size, most1 = _layout_tile(middle, flags1, keys1, values1)
        fits = (tl.maximum(most0, most1) <= 255) & (tl.max(highest_key, 0) <= 142)
        fits = fits & (SLOT * 4 + size * 4 < 512 * HEAD_DIM)
        if fits:
            place = tl.atomic_add(cursors_ptr, size)
            fits = place + size <= pool_words
            if fits:
                if GROUPS == 1:
                    tl.store(meta.to(tl.pointer_type(tl.uint8)) + lane, flags.to(tl.uint8))
                elif GROUPS == 2:
                    tl.store(meta.to(tl.pointer_type(tl.uint16)) + lane, flags.to(tl.uint16))
                else:
                    tl.store(meta + lane, flags)
                pool = pool_ptr.to(tl.pointer_type(tl.int32)) + place
                for tile in range(2):
                    first = tile == 0
                    halves = tl.where(first, halves0, halves1)
                    count = tl.where(first, flags0, flags1)
                    starts = tl.where(first, starts0, starts1)
                    key_patches = tl.where(first, kp0, kp1)
                    value_patches = tl.where(first, vp0, vp1)
                    key_misfits = tl.where(first, keys0, keys1)
                    value_misfits = tl.where(first, values0, values1)
                    record = meta + 32 * GROUPS + tile * 8 + lane // 32 * 2
                    is_first = lane % 32 == 0
                    tl.store(record, place + starts, mask=is_first)
                    tl.store(record + 1, key_patches | (value_patches << 8), mask=is_first)
                    escapes = pool_ptr + place.to(tl.int64) * 2
                    behind = starts + key_patches + value_patches
                    _store_escapes(escapes, halves, count, behind * 2, GROUPS)
                    _store_padding(escapes, behind, count, lane)
                    if tl.max(key_patches, 0) > 0:
                        _store_patches(
                            key, stride_kt, key_bases, pool, lane, tile, starts, key_misfits,
                            True, GROUPS,
                        )  # fmt: skip
                    if tl.max(value_patches, 0) > 0:
                        _store_patches(
                            value, stride_vt, value_bases, pool, lane, tile, starts + key_patches,
                            value_misfits, False, GROUPS,
                        )  # fmt: skip
                tl.store(entry_ptr, slot.to(tl.int32))
    if not fits:
        raw_slot = tl.atomic_add(cursors_ptr + 1, 1)
        if raw_slot < raw_slots:
            raw = raw_ptr + raw_slot.to(tl.int64) * (256 * HEAD_DIM)
            mask_d = (offs_d < HEAD_DIM)[None, :]
            for part in range(4):
                offs_t = (part * 32 + tl.arange(0, 32))[:, None]
                at = raw + offs_t * HEAD_DIM + offs_d[None, :]
                x = tl.load(key + offs_t * stride_kt + offs_d[None, :], mask=mask_d, other=0)
                tl.store(at, x, mask=mask_d)
                x = tl.load(value + offs_t * stride_vt + offs_d[None, :], mask=mask_d, other=0)
                tl.store(at + 128 * HEAD_DIM, x, mask=mask_d)
            tl.store(entry_ptr, -1 - raw_slot)
            listed = tl.atomic_add(raw_count_ptr + row, 1)
            tl.store(raw_list_ptr + row.to(tl.int64) * table_blocks + listed, number)
        else:
            tl.atomic_add(cursors_ptr + 2, 1)
