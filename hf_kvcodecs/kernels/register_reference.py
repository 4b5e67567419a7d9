"""The ``register`` word order in plain torch, written and read line by line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .register_blocks import (
    BLOCK_TOKENS,
    KEY_BASE_LIMIT,
    PATCHES,
    RegisterBlocks,
    slot_words,
)

C3 = 0x44444444


def element_index(head_dim: int, kind: int) -> torch.Tensor:
    """int64 ``[128 lanes, G, 4 steps, 2 khi, 2 hi8, 2 h]``: where in a tile ``[64 tokens, D]`` each
    number lies; ``kind`` 0 for keys, 1 for values."""
    w, g, j, u, i, khi, hi8, h = torch.meshgrid(
        *(torch.arange(n) for n in (4, 8, 4, head_dim // 64, 4, 2, 2, 2)), indexing="ij"
    )
    row, step = 16 * w + 8 * hi8 + g, 16 * i + 8 * khi + 2 * j + h
    index = row * head_dim + 64 * u + step if kind == 0 else step * head_dim + 64 * u + row
    return index.flatten(0, 2)


def register_pack_reference(
    keys: torch.Tensor, values: torch.Tensor, blocks: RegisterBlocks
) -> None:
    """See :func:`hf_kvcodecs.kernels.exponent_pack.register_pack`."""
    batch, heads, tokens, _ = keys.shape
    count = tokens // BLOCK_TOKENS
    for b in range(batch):
        for head in range(heads):
            for n in range(count):
                part = slice(n * BLOCK_TOKENS, (n + 1) * BLOCK_TOKENS)
                pair = torch.stack([keys[b, head, part], values[b, head, part]])
                row = b * heads + head
                _pack_block(pair.view(torch.int16), row, blocks.blocks + n, blocks)
    blocks.blocks += count


def _pack_block(pair: torch.Tensor, row: int, number: int, blocks: RegisterBlocks) -> None:
    table = blocks.table.view(-1, blocks.table.shape[2])
    packed = _encode(pair, blocks) if blocks.packable else None
    own_pool = blocks.own_pool_words
    if own_pool:
        slot = int(table[row, number])
        place = (slot + 1) * blocks.words.shape[1] - own_pool
        room = place + own_pool
    else:
        slot = row * table.shape[1] + number
        place, room = int(blocks.cursors[0]), blocks.pool.numel()
    if packed is None or place + len(packed[1]) > room:
        slot = int(blocks.cursors[1])
        blocks.cursors[1] += 1
        if slot >= blocks.raw_room:
            blocks.cursors[2] += 1
            return
        if blocks.raw_free is not None:
            slot = int(blocks.raw_free[slot])
        blocks.raw[slot] = pair
        table[row, number] = -1 - slot
        listed = blocks.raw_count.view(-1)
        blocks.raw_list.view(table.shape)[row, listed[row]] = number
        listed[row] += 1
        return
    words, pool, parts = packed
    G = blocks.head_dim // 64
    records = words[22 * 256 * G :][:16].view(2, 4, 2)
    for tile, warps in enumerate(parts):
        for warp, (start, counts) in enumerate(warps):
            records[tile, warp] = torch.tensor([place + start, _signed(counts)])
    blocks.words[slot, : len(words)] = words
    blocks.pool[place : place + len(pool)] = torch.tensor(pool, dtype=torch.int32)
    if not own_pool:
        blocks.cursors[0] += len(pool)
    table[row, number] = slot


def _encode(
    pair: torch.Tensor, blocks: RegisterBlocks
) -> tuple[torch.Tensor, list[int], list[list[tuple[int, int]]]] | None:
    """Words of the slot (records still zero), pool words, and per tile and warp: where its part
    begins, and its counts. None if the block has to stay raw."""
    D = blocks.head_dim
    G = D // 64
    x = pair.to(torch.int64) & 0xFFFF  # [2, 128, D]
    exponent, magnitude = (x >> 7) & 0xFF, x & 0x7FFF
    base = exponent.masked_fill(exponent == 255, 0).amax(1, keepdim=True)
    if int(base[0].max()) > KEY_BASE_LIMIT:
        return None
    code = exponent - base + 15
    misfit = (code < 0) | (code > 15)
    misfit[0] |= (code[0] < 1) | (exponent[0] == 0)
    misfit[0] &= magnitude[0] != 0
    code[0][(magnitude[0] == 0) & (base[0] > 0)] = 0
    code = code.masked_fill(misfit, 15)
    kept = x & 0x807F

    words = torch.zeros(slot_words(D), dtype=torch.int64)
    pool: list[int] = []
    parts = []
    for tile in range(2):
        chunks = words[tile * 11 * 256 * G :][: 11 * 256 * G].view(11, 128, 2 * G)
        escapes = torch.empty(128, 2, G, dtype=torch.int64)
        part = slice(64 * tile, 64 * tile + 64)
        for kind in range(2):
            index = element_index(D, kind)
            c = code[kind, part].flatten()[index]  # [128, G, step, khi, hi8, h]
            k = kept[kind, part].flatten()[index]
            byte = 8 * torch.arange(4).view(2, 2)
            low = ((((c & 1) << 7) | (k & 0x7F)) << byte).sum((-1, -2))  # [128, G, step, khi]
            for i in range(4):
                chunks[4 * kind + i] = low[:, :, i].flatten(1)
            nibble = ((k >> 15 << 7 | c >> 1) << byte).sum((-1, -2))
            n = nibble[..., 0] | _rotl(nibble[..., 1], 4)  # [128, G, step]
            escape = n & C3
            n = n & ~C3
            spread = (
                _rotl(n[..., 3] & 0x11111111, 2),
                _rotl(n[..., 3] & 0x22222222, 1),
                _rotl(n[..., 3] & 0x88888888, 31),
            )
            for i in range(3):
                chunks[8 + i, :, kind * G : kind * G + G] = n[..., i] | spread[i]
            escapes[:, kind] = sum(_rotl(escape[..., i], i) for i in range(4))
        halves = torch.stack([escapes & 0xFFFF, escapes >> 16], -1).flatten(2)  # [128, kind, 2 G]
        warps = []
        for warp in range(4):
            lanes = slice(32 * warp, 32 * warp + 32)
            start, found = len(pool), [0, 0]
            for kind in range(2):
                index = element_index(D, kind)[lanes]
                wrong = misfit[kind, part].flatten()[index].nonzero().tolist()
                number = x[kind, part].flatten()[index]
                found[kind] = len(wrong)
                for lane, u, i, khi, hi8, h in sorted(wrong, key=lambda at: (at[0], at[2])):
                    element = ((i * G + u) * 4 + hi8 + 2 * khi) * 2 + h
                    value = int(number[lane, u, i, khi, hi8, h])
                    pool.append(_signed(value | lane << 16 | element << 21))
            if max(found) > PATCHES:
                return None
            counts = found[0] | found[1] << 8
            lists = halves[lanes].transpose(0, 1).reshape(1 if G < 4 else 2, -1)
            for at, entries in enumerate(lists):
                quads, packed = _list(entries)
                counts |= quads << (16 + 8 * at)
                pool += packed
            warps.append((start, counts))
        parts.append(warps)
    meta = words[22 * 256 * G :]
    factors = ((base[0, 0] + 112) << 7).masked_fill(base[0, 0] == 0, 0)
    factors = factors.view(G, 4, 2, 4, 2).permute(3, 0, 1, 2, 4).reshape(-1, 2)  # j u i khi h
    meta[16:][: D // 2] = factors[:, 0] | factors[:, 1] << 16
    value_bases = base[1, 0].view(G, 4, 2, 8).permute(1, 3, 0, 2).flatten()  # w g u hi8
    meta[16 + D // 2 :] = _words(value_bases)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    size = words.nbytes + 4 * len(pool)
    return None if size >= pair.nbytes else (words, pool, parts)


def _list(halves: torch.Tensor) -> tuple[int, list[int]]:
    """The quads of a list and its pool words, from all halves in the order of their positions."""
    positions = (halves != 0xFFFF).nonzero().flatten()
    positions = torch.cat([positions, positions[-1:].expand(-len(positions) % 4)])
    low, high = halves[positions].view(-1, 2).unbind(1)
    packed = torch.cat([low | high << 16, _words(positions)])
    return len(positions) // 4, [_signed(word) for word in packed.tolist()]


def register_unpack_reference(
    blocks: RegisterBlocks,
    start: int = 0,
    stop: int | None = None,
    *,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`hf_kvcodecs.kernels.exponent_unpack.register_unpack`."""
    batch, heads, _ = blocks.table.shape
    stop = blocks.blocks if stop is None else stop
    shape = 2, batch, heads, (stop - start) * BLOCK_TOKENS, blocks.head_dim
    if into is None:
        into = torch.empty(shape, dtype=torch.bfloat16).unbind()
    for b, head, n in itertools.product(range(batch), range(heads), range(stop - start)):
        entry = int(blocks.table[b, head, start + n])
        block = blocks.raw[-1 - entry] if entry < 0 else _decode(blocks, entry)
        part = slice(n * BLOCK_TOKENS, (n + 1) * BLOCK_TOKENS)
        for states, found in zip(into, block.view(torch.bfloat16), strict=True):
            states[b, head, part] = found
    return into[0], into[1]


def _decode(blocks: RegisterBlocks, slot: int) -> torch.Tensor:
    D = blocks.head_dim
    G = D // 64
    words = blocks.words[slot].to(torch.int64) & 0xFFFFFFFF
    own = blocks.own_pool_words
    size = blocks.words.shape[1]
    first = (slot + 1) * size - own if own else 0
    pool = blocks.pool[first : first + own] if own else blocks.pool
    pool = pool.to(torch.int64) & 0xFFFFFFFF
    meta = words[22 * 256 * G :]
    factors = meta[16:][: D // 2]
    factors = torch.stack([factors & 0xFFFF, factors >> 16], -1).view(4, G, 4, 2, 2)
    key_base = ((factors.permute(1, 2, 3, 0, 4).reshape(1, D) >> 7) - 112).clamp(min=0)
    value_base = _bytes(meta[16 + D // 2 :][: D // 4]).view(4, 8, G, 2).permute(2, 0, 3, 1)
    base = torch.stack([key_base, value_base.reshape(1, D)])
    code = torch.empty(2, BLOCK_TOKENS, D, dtype=torch.int64)
    kept = torch.empty_like(code)
    patches: list[tuple[int, int, int, int]] = []
    for tile in range(2):
        chunks = words[tile * 11 * 256 * G :][: 11 * 256 * G].view(11, 128, 2 * G)
        escapes = torch.empty(128, 2, G, dtype=torch.int64)
        for warp in range(4):
            start, counts = meta[8 * tile + 2 * warp :][:2].tolist()
            start -= first
            key_patches, count = counts & 255, (counts & 255) + (counts >> 8 & 255)
            for k in range(count):
                word, kind = int(pool[start + k]), int(k >= key_patches)
                lane, element = word >> 16 & 31, word >> 21
                h, r, u, i = element & 1, element >> 1 & 3, (element >> 3) % G, (element >> 3) // G
                at = int(element_index(D, kind)[32 * warp + lane, u, i, r >> 1, r & 1, h])
                patches.append((kind, 64 * tile + at // D, at % D, word & 0xFFFF))
            halves = torch.full((1 if G < 4 else 2, 128 * G // (1 if G < 4 else 2)), 0xFFFF)
            start += count
            for number, expanded in enumerate(halves):
                quads = counts >> (16 + 8 * number) & 255
                entries = pool[start : start + 2 * quads]
                entries = torch.stack([entries & 0xFFFF, entries >> 16], 1).flatten()
                expanded[_bytes(pool[start + 2 * quads : start + 3 * quads])] = entries
                start += 3 * quads
            halves = halves.view(2, 32, G, 2).transpose(0, 1)
            escapes[32 * warp : 32 * warp + 32] = halves[..., 0] | halves[..., 1] << 16
        part = slice(64 * tile, 64 * tile + 64)
        for kind in range(2):
            e = escapes[:, kind]
            H = [chunks[8 + i, :, kind * G : kind * G + G] for i in range(3)]
            n = [(H[i] & ~C3 & 0xFFFFFFFF) | (_rotl(e, 32 - i) & C3) for i in range(3)]
            spread = _rotl(H[0], 30) & 0x11111111 | _rotl(H[1], 31) & 0x22222222
            n.append(spread | _rotl(H[2], 1) & 0x88888888 | _rotl(e, 29) & C3)
            N = torch.stack(n, -1)  # [128, G, step]
            high = torch.stack([N, _rotl(N, 28)], -1)  # khi
            low = chunks[4 * kind : 4 * kind + 4].view(4, 128, G, 2).permute(1, 2, 0, 3)
            shift = 8 * torch.arange(4).view(2, 2)
            low, high = (t[..., None, None] >> shift & 0xFF for t in (low, high))
            index = element_index(D, kind).flatten()
            code[kind, part].view(-1)[index] = ((high & 7) << 1 | low >> 7).flatten()
            kept[kind, part].view(-1)[index] = ((high >> 7) << 15 | low & 0x7F).flatten()
    exponent = code + base - 15
    exponent[0][code[0] == 0] = 0
    out = kept | (exponent & 0xFF) << 7
    for kind, token, channel, bits in patches:
        out[kind, token, channel] = bits
    return torch.where(out >= 1 << 15, out - (1 << 16), out).to(torch.int16)


def _rotl(x: torch.Tensor, amount: int) -> torch.Tensor:
    return ((x << amount) | (x >> (32 - amount))) & 0xFFFFFFFF


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _words(data: torch.Tensor) -> torch.Tensor:
    return (data.view(-1, 4) << (8 * torch.arange(4))).sum(1)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return (words.unsqueeze(-1) >> (8 * torch.arange(4)) & 0xFF).flatten()
