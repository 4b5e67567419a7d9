"""Triton pieces that read the register word order; :mod:`..register_blocks` writes it down.

Each step that has a one-instruction form on NVIDIA GPUs is inline PTX behind ``PTX``, with a plain
Triton twin beside it; tests hold the two equal. int32 words, 128 lanes (four warps of 32).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def rotate_right(x, amount: tl.constexpr):
    """int32 rotated right by ``amount`` in 1 .. 31 bits."""
    mask: tl.constexpr = (1 << (32 - amount)) - 1
    return ((x >> amount) & mask) | (x << (32 - amount))


@triton.jit
def load_chunk(words, lane, GROUPS: tl.constexpr):
    """A chunk ``[128, 2 * GROUPS]`` of a tile. A lane loads its own row and no other's part: four
    words at a time, since Triton would share out wider rows among lanes."""
    if GROUPS <= 2:
        return tl.load(words + lane[:, None] * (2 * GROUPS) + tl.arange(0, 2 * GROUPS)[None, :])
    else:
        at = words + lane[:, None] * 8 + tl.arange(0, 4)[None, :]
        x = tl.join(tl.load(at), tl.load(at + 4))
        return tl.reshape(tl.permute(x, (0, 2, 1)), [128, 8])


@triton.jit
def nibble_words(h0, h1, h2, escapes, PTX: tl.constexpr):
    """Three stored words and the escape word of four steps -> the four steps' nibble words."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 e1, e2, e3, a, b, c;
            shf.r.wrap.b32 e1, $7, $7, 1;
            shf.r.wrap.b32 e2, $7, $7, 2;
            shf.r.wrap.b32 e3, $7, $7, 3;
            lop3.b32 $0, $4, $7, 0x44444444, 0xd8;
            lop3.b32 $1, $5, e1, 0x44444444, 0xd8;
            lop3.b32 $2, $6, e2, 0x44444444, 0xd8;
            shf.r.wrap.b32 a, $4, $4, 2;
            shf.r.wrap.b32 b, $5, $5, 1;
            shf.l.wrap.b32 c, $6, $6, 1;
            and.b32 a, a, 0x11111111;
            lop3.b32 a, b, 0x22222222, a, 0xea;
            lop3.b32 a, c, 0x88888888, a, 0xea;
            lop3.b32 $3, e3, 0x44444444, a, 0xea;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [h0, h1, h2, escapes],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        C3: tl.constexpr = 0x44444444  # where a nibble word has code bit 3
        n0 = (h0 & ~C3) | (escapes & C3)
        n1 = (h1 & ~C3) | (rotate_right(escapes, 1) & C3)
        n2 = (h2 & ~C3) | (rotate_right(escapes, 2) & C3)
        n3 = (rotate_right(h0, 2) & 0x11111111) | (rotate_right(h1, 1) & 0x22222222)
        n3 = n3 | (rotate_right(h2, 31) & -0x77777778) | (rotate_right(escapes, 3) & C3)
        return n0, n1, n2, n3


@triton.jit
def register_pairs(low0, low1, nibbles, PTX: tl.constexpr):
    """One step's words -> its four registers (hi8 + 2 khi), two 16-bit numbers each: sign, the
    4-bit code as exponent field, mantissa."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shf.r.wrap.b32 b, $6, $6, 4;
            and.b32 a, $6, 0x87878787;
            and.b32 b, b, 0x87878787;
            prmt.b32 $0, $4, a, 0x5140;
            prmt.b32 $1, $4, a, 0x7362;
            prmt.b32 $2, $5, b, 0x5140;
            prmt.b32 $3, $5, b, 0x7362;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [low0, low1, nibbles],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        high0 = nibbles & -0x78787879
        high1 = rotate_right(nibbles, 4) & -0x78787879
        return (
            _two_numbers(low0, high0),
            _two_numbers(low0 >> 16, high0 >> 16),
            _two_numbers(low1, high1),
            _two_numbers(low1 >> 16, high1 >> 16),
        )


@triton.jit
def _two_numbers(low, high):
    """Bytes 0 and 1 of ``low`` and of ``high`` as the low and high bytes of two numbers."""
    return (low & 0xFF) | ((high & 0xFF) << 8) | ((low & 0xFF00) << 8) | ((high & 0xFF00) << 16)


def _patch_ptx(groups: int) -> tuple[str, str]:
    """PTX and constraints that write patches over the registers of one tensor.

    Operands, for ``packed`` groups at a time (all of them up to two; else one, since the order in
    which Triton packs more is its own): 16 registers (number ``i * 4 + r``, tied), the group's
    number, the lane, the numbers of the first patch and of the one behind the last, the lane's own
    patch, the index of patch 0 in the pool, the pool. A warp without patches takes one branch; with
    one, a tree of uniform branches finds its register.
    """
    packed = groups if groups <= 2 else 1
    registers = 16 * packed
    group, lane, first, end, own, place, pool = (2 * registers + n * packed for n in range(7))
    lines = [
        "{ .reg .pred p, q; .reg .b32 k, w, e, v, s; .reg .b64 a;",
        f"setp.ge.s32 p, ${first}, ${end}; @p bra DONE; mov.b32 k, ${first};",
        f"LOOP: shfl.sync.idx.b32 w, ${own}, k, 31, -1; setp.lt.u32 p, k, 32; @p bra HAVE;",
        f"add.u32 w, k, ${place}; mad.wide.u32 a, w, 4, ${pool}; ld.global.u32 w, [a];",
        f"HAVE: bfe.u32 e, w, 16, 5; setp.eq.u32 q, e, ${lane}; shr.u32 e, w, 22;",
        "and.b32 v, w, 0x200000; setp.ne.u32 p, v, 0; selp.b32 s, 0x5410, 0x3254, p;",
        "selp.b32 s, s, 0x3210, q;",
    ]
    by_element = {}
    for register in range(registers):
        tensor, of_group = divmod(register, packed)
        step, part = divmod(tensor, 4)
        by_element[(step * packed + of_group) * 4 + part] = register
    if packed < groups:  # e is (step * groups + group) * 4 + part
        lines += [
            f"bfe.u32 v, e, 2, {groups.bit_length() - 1}; setp.ne.u32 p, v, ${group}; @p bra NEXT;",
            f"and.b32 v, e, 3; shr.u32 e, e, {groups.bit_length() + 1}; shl.b32 e, e, 2;",
            "or.b32 e, e, v;",
        ]

    def tree(low: int, high: int) -> None:
        if high - low == 1:
            register = by_element[low]
            lines.append(f"prmt.b32 ${register}, ${register}, w, s; bra NEXT;")
            return
        middle = (low + high) // 2
        lines.append(f"setp.ge.u32 p, e, {middle}; @p bra E{low}_{high};")
        tree(low, middle)
        lines.append(f"E{low}_{high}:")
        tree(middle, high)

    tree(0, registers)
    lines += [
        f"NEXT: add.u32 k, k, 1; setp.lt.s32 p, k, ${end}; @p bra LOOP; DONE: }}",
    ]
    tied = [str(register) for register in range(registers)]
    constraints = ["=r"] * registers + tied + ["r"] * (6 * packed) + ["l"] * packed
    return "\n".join(lines), ",".join(constraints)


# A lane's word ``$2`` of a run that begins at word ``$3`` of the pool and has ``$1``.
LOAD_WORD = tl.constexpr(
    """{
    .reg .pred p; .reg .b32 t; .reg .b64 a;
    setp.lt.u32 p, $2, $1; mov.b32 $0, 0;
    add.u32 t, $2, $3; mad.wide.u32 a, t, 4, $4;
    @p ld.global.b32 $0, [a];
    }"""
)
LOAD_WORD_IO = tl.constexpr("=&r,r,r,r,l")
LOAD_QUAD = tl.constexpr(
    """{
    .reg .pred p; .reg .b32 t; .reg .b64 a;
    setp.lt.u32 p, $4, $3;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;
    mad.lo.u32 t, $4, 2, $5; mad.wide.u32 a, t, 4, $6;
    @p ld.global.b32 $0, [a]; @p ld.global.b32 $1, [a+4];
    sub.u32 t, t, $4; mad.lo.u32 t, $3, 2, t; mad.wide.u32 a, t, 4, $6;
    @p ld.global.b32 $2, [a];
    }"""
)
LOAD_QUAD_IO = tl.constexpr("=&r,=&r,=&r,r,r,r,l")


def _scatter_ptx(groups: int) -> tuple[str, str]:
    """PTX and constraints that scatter a warp's list to its lanes, through shared memory.

    Operands: the lane's escape words (outputs), its quad (two words of entries, one of positions),
    the number of quads, the lane, the list's index in the pool, the pool. Quads from 32 on are
    loaded here.
    """
    words = groups * (2 if groups < 4 else 1)
    low, high, positions, quads, lane, first, pool = range(words, words + 7)
    kinds, per_kind = (2, groups) if groups < 4 else (1, groups)
    size = 4 * 32 * words  # bytes of a warp

    def scatter(low: str, high: str, positions: str) -> list[str]:
        lines = []
        for n, word in enumerate((low, low, high, high)):
            lines.append(f"bfe.u32 t, {positions}, {8 * n}, 8; mad.lo.u32 t, t, 2, w;")
            entry = word if n % 2 == 0 else "e"
            if n % 2:
                lines.append(f"shr.u32 e, {word}, 16;")
            lines.append(f"@p st.shared.b16 [t], {entry};")
        return lines

    vector = {1: "", 2: ".v2", 4: ".v4"}[per_kind]
    ones = ", ".join(["m"] * per_kind)
    lines = [
        "{ .reg .pred p, q; .reg .b32 w, o, t, e, m, k, x, y, z; .reg .b64 a;",
        f".shared .align 16 .b8 lists[{4 * size}];",
        "mov.u32 t, %tid.x; shr.u32 t, t, 5; mov.u32 w, lists;",
        f"mad.lo.u32 w, t, {size}, w; mad.lo.u32 o, ${lane}, {4 * per_kind}, w; mov.b32 m, -1;",
        *(
            f"st.shared{vector}.b32 [o+{128 * per_kind * kind}], {{{ones}}};"
            if per_kind > 1
            else f"st.shared.b32 [o+{128 * kind}], m;"
            for kind in range(kinds)
        ),
        f"bar.warp.sync -1; setp.lt.u32 p, ${lane}, ${quads};",
        *scatter(f"${low}", f"${high}", f"${positions}"),
        f"setp.gt.u32 q, ${quads}, 32; @!q bra DONE; add.u32 k, ${lane}, 32;",
        f"LOOP: setp.lt.u32 p, k, ${quads};",
        f"mad.lo.u32 t, k, 2, ${first}; mad.wide.u32 a, t, 4, ${pool};",
        "@p ld.global.b32 x, [a]; @p ld.global.b32 y, [a+4];",
        f"sub.u32 t, t, k; mad.lo.u32 t, ${quads}, 2, t; mad.wide.u32 a, t, 4, ${pool};",
        "@p ld.global.b32 z, [a];",
        *scatter("x", "y", "z"),
        f"add.u32 k, k, 32; sub.u32 t, k, ${lane}; setp.lt.u32 q, t, ${quads}; @q bra LOOP;",
        "DONE: bar.warp.sync -1;",
    ]
    for kind in range(kinds):
        found = ", ".join(f"${kind * per_kind + n}" for n in range(per_kind))
        found = f"{{{found}}}" if per_kind > 1 else found
        lines.append(f"ld.shared{vector}.b32 {found}, [o+{128 * per_kind * kind}];")
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * words + ["r"] * 6 + ["l"])


def _constants(make: Any) -> dict[int, Any]:
    return {g: tuple(tl.constexpr(text) for text in make(g)) for g in (1, 2, 4)}


(PATCH_1, PATCH_IO_1), (PATCH_2, PATCH_IO_2), (PATCH_4, PATCH_IO_4) = _constants(
    _patch_ptx
).values()
(SCATTER_1, SCATTER_IO_1), (SCATTER_2, SCATTER_IO_2), (SCATTER_4, SCATTER_IO_4) = _constants(
    _scatter_ptx
).values()


@triton.jit
def load_record(records, tile, lane, stored):
    """Each lane's record for one tile, int64: its place in the pool in the low half, its counts in
    the high one; ``records`` points behind a slot's chunks. Zero unless ``stored``: what lies in a
    free slot may be anything."""
    record = (records + tile * 8).to(tl.pointer_type(tl.int64)) + lane // 32
    return tl.load(record, mask=stored, other=0)


@triton.jit
def record_parts(record):
    """Place and counts."""
    return record.to(tl.int32), (record >> 32).to(tl.int32)


@triton.jit
def patch_counts(counts):
    """How many key patches there are, and how many patches."""
    keys = counts & 255
    return keys, keys + ((counts >> 8) & 255)


@triton.jit
def _list_of(place, counts, NUMBER: tl.constexpr):
    """Where in the pool a list begins, and its quads."""
    first = place + patch_counts(counts)[1]
    quads = (counts >> 16) & 255
    if NUMBER == 1:
        first += 3 * quads
        quads = (counts >> 24) & 255
    return first, quads


@triton.jit
def _load_quad(pool_ptr, place, counts, lane, NUMBER: tl.constexpr):
    first, quads = _list_of(place, counts, NUMBER)
    pool = tl.full([128], 0, tl.int64) + pool_ptr.to(tl.int64)
    return tl.inline_asm_elementwise(
        LOAD_QUAD, LOAD_QUAD_IO, [quads, lane % 32, first, pool], (tl.int32,) * 3, True, 1
    )


@triton.jit
def load_extras(pool_ptr, record, lane, GROUPS: tl.constexpr, PTX: tl.constexpr):
    """What each lane keeps of its warp's part of the pool, loaded ahead of use: ``[128, n]``, its
    patch and its quad of each list. Without PTX its patch alone, ``[128]``."""
    number = lane % 32
    place, counts = record_parts(record)
    patches = patch_counts(counts)[1]
    if PTX:
        # No tl.load: Triton would take it for one to pipeline.
        pool = tl.full([128], 0, tl.int64) + pool_ptr.to(tl.int64)
        patch = tl.inline_asm_elementwise(
            LOAD_WORD, LOAD_WORD_IO, [patches, number, place, pool], tl.int32, True, 1
        )
        low, high, positions = _load_quad(pool_ptr, place, counts, lane, 0)
        first = tl.join(tl.join(patch, high), tl.join(low, positions))
        if GROUPS < 4:
            return tl.reshape(first, [128, 4])
        else:
            low, high, positions = _load_quad(pool_ptr, place, counts, lane, 1)
            second = tl.join(tl.join(patch, high), tl.join(low, positions))
            return tl.reshape(tl.join(first, second), [128, 8])
    else:
        return tl.load(pool_ptr + place + number, mask=number < patches, other=0)


@triton.jit
def _four(x):
    a, b = tl.split(tl.reshape(x, [128, 2, 2]))
    p, r = tl.split(a)
    q, s = tl.split(b)
    return p, q, r, s


@triton.jit
def _searched(pool_ptr, place, counts, lane, NUMBER: tl.constexpr, FIRST: tl.constexpr,
              UNITS: tl.constexpr):  # fmt: skip
    """Halves ``[128, UNITS]`` at positions from ``FIRST + UNITS * lane`` on, found in a list by
    bisection."""
    first, quads = _list_of(place, counts, NUMBER)
    address = pool_ptr + first
    entries = address.to(tl.pointer_type(tl.uint16))[:, None]
    positions = (address + 2 * quads).to(tl.pointer_type(tl.uint8))[:, None]
    count = 4 * quads[:, None]
    wanted = FIRST + (lane % 32)[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
    before = wanted * 0  # entries at lower positions
    for step in tl.static_range(9):
        probe = before + (256 >> step)
        inside = probe <= count
        position = tl.load(positions + tl.where(inside, probe, 1) - 1, mask=inside, other=0)
        before = tl.where(inside, tl.where(position.to(tl.int32) < wanted, probe, before), before)
    inside = before < count
    position = tl.load(positions + before, mask=inside, other=0).to(tl.int32)
    entry = tl.load(entries + before, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, tl.where(position == wanted, entry, 0xFFFF), 0xFFFF)


@triton.jit
def _searched_words(pool_ptr, place, counts, lane, NUMBER: tl.constexpr, FIRST: tl.constexpr,
                    GROUPS: tl.constexpr):  # fmt: skip
    halves = _searched(pool_ptr, place, counts, lane, NUMBER, FIRST, 2 * GROUPS)
    low, high = tl.split(tl.reshape(halves, [128, GROUPS, 2]))
    return low | (high << 16)


@triton.jit
def escape_words(pool_ptr, record, extras, lane, GROUPS: tl.constexpr, PTX: tl.constexpr):
    """The lanes' escape words ``[128, 2 * GROUPS]``, keys' groups first, all ones where nothing is
    stored, and their patches ``[128]``."""
    number = lane % 32
    place, counts = record_parts(record)
    pool = tl.full([128], 0, tl.int64) + pool_ptr.to(tl.int64)
    if PTX and GROUPS < 4:
        patch, low, high, positions = _four(extras)
        start, quads = _list_of(place, counts, 0)
        operands = [low, high, positions, quads, number, start, pool]
        if GROUPS == 1:
            a, b = tl.inline_asm_elementwise(
                SCATTER_1, SCATTER_IO_1, operands, (tl.int32,) * 2, True, 1
            )
            return tl.join(a, b), patch
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                SCATTER_2, SCATTER_IO_2, operands, (tl.int32,) * 4, True, 1
            )
            return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [128, 4]), patch
    elif PTX:
        first, second = tl.split(tl.reshape(extras, [128, 4, 2]))
        patch, low, high, positions = _four(first)
        start, quads = _list_of(place, counts, 0)
        a, b, c, d = tl.inline_asm_elementwise(
            SCATTER_4, SCATTER_IO_4, [low, high, positions, quads, number, start, pool],
            (tl.int32,) * 4, True, 1,
        )  # fmt: skip
        _, low, high, positions = _four(second)
        start, quads = _list_of(place, counts, 1)
        e, f, g, h = tl.inline_asm_elementwise(
            SCATTER_4, SCATTER_IO_4, [low, high, positions, quads, number, start, pool],
            (tl.int32,) * 4, True, 1,
        )  # fmt: skip
        even = tl.join(tl.join(a, e), tl.join(c, g))
        odd = tl.join(tl.join(b, f), tl.join(d, h))
        return tl.reshape(tl.join(even, odd), [128, 8]), patch
    else:
        keys = _searched_words(pool_ptr, place, counts, lane, 0, 0, GROUPS)
        LAST: tl.constexpr = 0 if GROUPS < 4 else 1
        BEHIND: tl.constexpr = 64 * GROUPS if GROUPS < 4 else 0
        values = _searched_words(pool_ptr, place, counts, lane, LAST, BEHIND, GROUPS)
        words = tl.permute(tl.join(keys, values), (0, 2, 1))
        return tl.reshape(words, [128, 2 * GROUPS]), extras


@triton.jit
def decode_registers(w0, w1, w2, w3, n0, n1, n2, n3, GROUPS: tl.constexpr, PTX: tl.constexpr):
    """Low words of four steps ``[128, 2 * GROUPS]`` and nibble words ``[128, GROUPS]`` -> 16
    registers ``[128, GROUPS]``, number ``4 * step + hi8 + 2 * khi``."""
    p, q = tl.split(tl.reshape(w0, [128, GROUPS, 2]))
    a0, b0, c0, d0 = register_pairs(p, q, n0, PTX)
    p, q = tl.split(tl.reshape(w1, [128, GROUPS, 2]))
    a1, b1, c1, d1 = register_pairs(p, q, n1, PTX)
    p, q = tl.split(tl.reshape(w2, [128, GROUPS, 2]))
    a2, b2, c2, d2 = register_pairs(p, q, n2, PTX)
    p, q = tl.split(tl.reshape(w3, [128, GROUPS, 2]))
    a3, b3, c3, d3 = register_pairs(p, q, n3, PTX)
    return a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3


@triton.jit
def kinds(words, GROUPS: tl.constexpr):
    """``[128, 2 * GROUPS]`` -> the keys' and the values' ``[128, GROUPS]``."""
    return tl.split(tl.permute(tl.reshape(words, [128, 2, GROUPS]), (0, 2, 1)))


@triton.jit
def numbers(r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, ra, rb, rc, rd, re, rf):
    """16 registers -> int16 ``[128, GROUPS, khi, hi8, step bit 1, step bit 0, half]``."""
    s0 = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    s1 = tl.join(tl.join(r4, r6), tl.join(r5, r7))
    s2 = tl.join(tl.join(r8, ra), tl.join(r9, rb))
    s3 = tl.join(tl.join(rc, re), tl.join(rd, rf))
    x = tl.join(tl.join(s0, s2), tl.join(s1, s3))
    return tl.join(x.to(tl.int16), (x >> 16).to(tl.int16))


@triton.jit
def key_tile(x, GROUPS: tl.constexpr):
    """:func:`numbers` -> ``[64 tokens, D channels]``."""
    x = tl.reshape(x, [4, 8, 4, GROUPS, 2, 2, 2, 2, 2])  # warp g j group khi hi8 step1 step0 half
    return tl.reshape(tl.permute(x, (0, 5, 1, 3, 6, 7, 4, 2, 8)), [64, 64 * GROUPS])


@triton.jit
def value_tile(x, GROUPS: tl.constexpr):
    """:func:`numbers` -> ``[D channels, 64 tokens]``."""
    x = tl.reshape(x, [4, 8, 4, GROUPS, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(x, (3, 0, 5, 1, 6, 7, 4, 2, 8)), [64 * GROUPS, 64])


@triton.jit
def patch_registers(
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, ra, rb, rc, rd, re, rf,
    first, end, own, pool_ptr, place, lane, GROUPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The registers with the warp's patches ``first`` to ``end - 1`` (int32 ``[128]``) written over
    them. Patch ``n`` is lane ``n``'s ``own``, and word ``place + n`` of the pool."""
    if PTX:
        begin = tl.broadcast_to(first[:, None], [128, GROUPS])
        behind = tl.broadcast_to(end[:, None], [128, GROUPS])
        of_own = tl.broadcast_to(own[:, None], [128, GROUPS])
        of_lane = tl.broadcast_to((lane % 32)[:, None], [128, GROUPS])
        group = tl.broadcast_to(tl.arange(0, GROUPS)[None, :], [128, GROUPS])
        at = tl.broadcast_to(place[:, None], [128, GROUPS])
        pool = tl.full([128, GROUPS], 0, tl.int64) + pool_ptr.to(tl.int64)
        operands = [
            r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, ra, rb, rc, rd, re, rf,
            group, of_lane, begin, behind, of_own, at, pool,
        ]  # fmt: skip
        if GROUPS == 1:
            return tl.inline_asm_elementwise(
                PATCH_1, PATCH_IO_1, operands, (tl.int32,) * 16, True, 1
            )
        elif GROUPS == 2:
            return tl.inline_asm_elementwise(
                PATCH_2, PATCH_IO_2, operands, (tl.int32,) * 16, True, 2
            )
        else:
            return tl.inline_asm_elementwise(
                PATCH_4, PATCH_IO_4, operands, (tl.int32,) * 16, True, 1
            )
    else:
        for k in range(0, tl.max(end - first, 0)):
            stored = first + k < end
            patch = tl.load(pool_ptr + place + first + k, mask=stored, other=0)
            hit = stored & (((patch >> 16) & 31) == lane % 32)
            element = tl.where(hit, patch >> 21, -1)[:, None]
            patch = patch[:, None]
            r0 = _patched(r0, 0, element, patch, GROUPS)
            r1 = _patched(r1, 1, element, patch, GROUPS)
            r2 = _patched(r2, 2, element, patch, GROUPS)
            r3 = _patched(r3, 3, element, patch, GROUPS)
            r4 = _patched(r4, 4, element, patch, GROUPS)
            r5 = _patched(r5, 5, element, patch, GROUPS)
            r6 = _patched(r6, 6, element, patch, GROUPS)
            r7 = _patched(r7, 7, element, patch, GROUPS)
            r8 = _patched(r8, 8, element, patch, GROUPS)
            r9 = _patched(r9, 9, element, patch, GROUPS)
            ra = _patched(ra, 10, element, patch, GROUPS)
            rb = _patched(rb, 11, element, patch, GROUPS)
            rc = _patched(rc, 12, element, patch, GROUPS)
            rd = _patched(rd, 13, element, patch, GROUPS)
            re = _patched(re, 14, element, patch, GROUPS)
            rf = _patched(rf, 15, element, patch, GROUPS)
        return r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, ra, rb, rc, rd, re, rf


@triton.jit
def _patched(register, NUMBER: tl.constexpr, element, patch, GROUPS: tl.constexpr):
    """Register ``NUMBER`` ``[128, GROUPS]`` with ``patch`` in the half that ``element`` names."""
    index = ((NUMBER // 4 * GROUPS + tl.arange(0, GROUPS)[None, :]) * 4 + NUMBER % 4) * 2
    low = (register & -0x10000) | (patch & 0xFFFF)
    high = (register & 0xFFFF) | (patch << 16)
    return tl.where(element == index, low, tl.where(element == index + 1, high, register))


@triton.jit
def _pairs_times(pairs, factors, PTX: tl.constexpr):
    """Two bf16 numbers with 4-bit exponent fields times powers of two, exactly; zeros stay."""
    if PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, factors, pairs * 0 - 0x7FFF8000],
            tl.int32, True, 1,
        )  # fmt: skip
    else:
        return _times(pairs, factors) | (_times(pairs >> 16, factors >> 16) << 16)


@triton.jit
def _times(number, factor):
    """16-bit halves: a bf16 number times a power of two or zero."""
    moved = (number & 0xFFFF) + (factor & 0x7F80) - 0x3F80
    is_zero = ((number & 0x780) == 0) | ((factor & 0x7F80) == 0)
    return tl.where(is_zero, number & 0x8000, moved) & 0xFFFF


@triton.jit
def key_factors(words, GROUPS: tl.constexpr):
    """Words ``[4, 8 * GROUPS]`` of a slot -> each lane's ``[128, GROUPS]``, by step and khi."""
    x = tl.broadcast_to(words[None, None, :, :], [4, 8, 4, 8 * GROUPS])
    low, high = tl.split(tl.reshape(x, [128, GROUPS, 4, 2]))
    low_even, low_odd = tl.split(tl.reshape(low, [128, GROUPS, 2, 2]))
    high_even, high_odd = tl.split(tl.reshape(high, [128, GROUPS, 2, 2]))
    a0, a2 = tl.split(low_even)
    a1, a3 = tl.split(low_odd)
    b0, b2 = tl.split(high_even)
    b1, b3 = tl.split(high_odd)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def register_keys(
    w0, w1, w2, w3, n0, n1, n2, n3, factors,
    first, end, own, pool_ptr, place, lane,
    GROUPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Keys ``[64 tokens, D]`` bf16, exact: times their channels' factors, misfits patched in."""
    a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u = decode_registers(
        w0, w1, w2, w3, n0, n1, n2, n3, GROUPS, PTX
    )
    f0, f1, f2, f3, f4, f5, f6, f7 = key_factors(factors, GROUPS)
    a, b = _pairs_times(a, f0, PTX), _pairs_times(b, f0, PTX)
    c, d = _pairs_times(c, f1, PTX), _pairs_times(d, f1, PTX)
    e, f = _pairs_times(e, f2, PTX), _pairs_times(f, f2, PTX)
    g, h = _pairs_times(g, f3, PTX), _pairs_times(h, f3, PTX)
    i, j = _pairs_times(i, f4, PTX), _pairs_times(j, f4, PTX)
    k, l = _pairs_times(k, f5, PTX), _pairs_times(l, f5, PTX)
    o, r = _pairs_times(o, f6, PTX), _pairs_times(r, f6, PTX)
    s, u = _pairs_times(s, f7, PTX), _pairs_times(u, f7, PTX)
    a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u = patch_registers(
        a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u,
        first, end, own, pool_ptr, place, lane, GROUPS, PTX,
    )  # fmt: skip
    x = numbers(a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u)
    return key_tile(x, GROUPS).to(tl.bfloat16, bitcast=True)


@triton.jit
def register_values(
    w0, w1, w2, w3, n0, n1, n2, n3, low_base, high_base,
    first, end, own, pool_ptr, place, lane,
    GROUPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Values ``[D, 64 tokens]`` bf16, exact: bases ``[128, GROUPS]`` of channels hi8 = 0 and 1
    added, misfits patched in."""
    a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u = decode_registers(
        w0, w1, w2, w3, n0, n1, n2, n3, GROUPS, PTX
    )
    a, b, c, d = a + low_base, b + high_base, c + low_base, d + high_base
    e, f, g, h = e + low_base, f + high_base, g + low_base, h + high_base
    i, j, k, l = i + low_base, j + high_base, k + low_base, l + high_base
    o, r, s, u = o + low_base, r + high_base, s + low_base, u + high_base
    a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u = patch_registers(
        a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u,
        first, end, own, pool_ptr, place, lane, GROUPS, PTX,
    )  # fmt: skip
    x = numbers(a, b, c, d, e, f, g, h, i, j, k, l, o, r, s, u)
    return value_tile(x, GROUPS).to(tl.bfloat16, bitcast=True)


@triton.jit
def _byte_base(words, shift):
    return ((words >> shift) & 0xFF) * 0x800080 - 15 * 0x800080


@triton.jit
def lane_bases(bases_ptr, lane, GROUPS: tl.constexpr):
    """The bases of each lane's channels, hi8 = 0 and 1, as ``[128, GROUPS]``: less 15, in the
    exponent field of both halves."""
    row = lane // 32 * 8 + lane % 32 // 4
    if GROUPS == 1:
        words = tl.load(bases_ptr.to(tl.pointer_type(tl.uint16)) + row).to(tl.int32)
        return _byte_base(words, 0)[:, None], _byte_base(words, 8)[:, None]
    elif GROUPS == 2:
        words = tl.load(bases_ptr + row)
        low = tl.join(_byte_base(words, 0), _byte_base(words, 16))
        return low, tl.join(_byte_base(words, 8), _byte_base(words, 24))
    else:
        words = tl.load(bases_ptr + row * 2)
        more = tl.load(bases_ptr + row * 2 + 1)
        low_even = tl.join(_byte_base(words, 0), _byte_base(more, 0))
        low_odd = tl.join(_byte_base(words, 16), _byte_base(more, 16))
        high_even = tl.join(_byte_base(words, 8), _byte_base(more, 8))
        high_odd = tl.join(_byte_base(words, 24), _byte_base(more, 24))
        low = tl.reshape(tl.join(low_even, low_odd), [128, 4])
        return low, tl.reshape(tl.join(high_even, high_odd), [128, 4])
