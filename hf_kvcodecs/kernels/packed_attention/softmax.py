"""The running softmax of one column tile: scores of 64 tokens at a time.

Rows of a tile are ``16 warp + 8 hi8 + g`` as the matrix unit deals them out. What is one number per
column is kept as ``[4 warps, 8 g, N]`` with equal rows, so that every lane has the numbers of its
own columns in its registers; the denominator stays one partial sum per lane until the end.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _column_max_ptx(columns: int) -> tuple[str, str]:
    """PTX and constraints for each column's new maximum, and what the old sums are multiplied by.

    Operands, ``n = columns / 4`` each: the new maxima, the factors, the lane's highest scores, the
    old maxima; then the scores' scale, and the lane. The columns of lane ``32 warp + 4 g + j`` are
    ``8 (c / 2) + 2 j + c % 2``. A warp's lanes halve their columns with each exchange; the warps
    meet in shared memory, behind one barrier.
    """
    n = columns // 4
    scale, lane = 4 * n, 4 * n + 1
    lines = [
        f"{{ .reg .pred p; .reg .b32 s, t, o; .reg .f32 r, v<{2 * n}>, w<4>;",
        f".shared .align 16 .b8 highest[{max(16 * columns, 1024)}];",
        *(f"mov.f32 v{c}, ${2 * n + c};" for c in range(n)),
        f"shr.u32 s, ${lane}, 5; shl.b32 s, s, 2; mov.u32 o, highest; and.b32 t, ${lane}, 3;",
        "add.u32 s, s, o; mad.lo.u32 o, t, 32, o; mad.lo.u32 s, t, 32, s;",
    ]
    count = n
    for bit in (16, 8, 4):
        lines.append(f"and.b32 t, ${lane}, {bit}; setp.ne.u32 p, t, 0;")
        if count == 1:
            lines.append(f"shfl.sync.bfly.b32 r, v0, {bit}, 31, -1; max.f32 v0, v0, r;")
            continue
        count //= 2
        for c in range(count):
            lines += [
                f"selp.f32 r, v{c}, v{c + count}, p; selp.f32 v{c}, v{c + count}, v{c}, p;",
                f"shfl.sync.bfly.b32 r, r, {bit}, 31, -1; max.f32 v{c}, v{c}, r;",
            ]
        # Columns c and c + 1 are neighbours for even c, 8 apart from then on.
        offset = 16 if count == 1 else count // 2 * 128
        lines.append(f"selp.u32 t, {offset}, 0, p; add.u32 s, s, t;")
    lines += [f"st.shared.f32 [s+{16 * c}], v{c};" for c in range(count)]
    lines.append("bar.sync 0;")
    for c in range(n):
        at = c // 2 * 128 + c % 2 * 16
        lines.append(f"ld.shared.v4.f32 {{w0, w1, w2, w3}}, [o+{at}];")
        lines += [
            "max.f32 w0, w0, w1; max.f32 w2, w2, w3; max.f32 w0, w0, w2;",
            f"mul.f32 w0, w0, ${scale};",
            f"max.f32 ${c}, w0, ${3 * n + c}; sub.f32 w1, ${3 * n + c}, ${c};",
            f"ex2.approx.ftz.f32 ${n + c}, w1;",
        ]
    return "\n".join([*lines, "}"]), ",".join(["=&f"] * (2 * n) + ["f"] * (2 * n + 1) + ["r"])


MAX_16, MAX_IO_16 = (tl.constexpr(text) for text in _column_max_ptx(16))
MAX_32, MAX_IO_32 = (tl.constexpr(text) for text in _column_max_ptx(32))


@triton.jit
def _split4(x):
    """``[4, 8, N]`` of 16 columns, by ``c``."""
    x = tl.permute(tl.reshape(x, [4, 8, 2, 4, 2]), (0, 1, 3, 2, 4))  # w g j n8 h
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _join4(a, b, c, d):
    x = tl.join(tl.join(a, c), tl.join(b, d))  # w g j n8 h
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), [4, 8, 16])


@triton.jit
def _halves(x):
    """``[4, 8, 32]`` -> columns 0-15 and 16-31."""
    return tl.split(tl.permute(tl.reshape(x, [4, 8, 2, 16]), (0, 1, 3, 2)))


@triton.jit
def _whole(low, high):
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [4, 8, 32])


@triton.jit
def new_max(scores, m, scale, lane, N: tl.constexpr, WGMMA: tl.constexpr):
    """The columns' maxima ``[4, 8, N]`` with ``[64, N]`` scores times ``scale`` seen too, and 2 to
    the power of the old ones less the new; ``lane`` int32 ``[128]``.

    ``WGMMA``: inline PTX that relies on Hopper's order of a product's numbers; besides, it keeps
    Triton from carrying the maxima in three layouts.
    """
    own = tl.reshape(tl.max(by_lane(scores, 64, N), 2), [4, 8, N])
    if WGMMA and N == 16:
        x0, x1, x2, x3 = _split4(own)
        m0, m1, m2, m3 = _split4(m)
        scales = tl.full([4, 8, 4], 1.0, tl.float32) * scale
        m0, m1, m2, m3, a0, a1, a2, a3 = tl.inline_asm_elementwise(
            MAX_16, MAX_IO_16,
            [x0, x1, x2, x3, m0, m1, m2, m3, scales, tl.reshape(lane, [4, 8, 4])],
            (tl.float32,) * 8, True, 1,
        )  # fmt: skip
        return _join4(m0, m1, m2, m3), _join4(a0, a1, a2, a3)
    elif WGMMA and N == 32:
        low, high = _halves(own)
        x0, x1, x2, x3 = _split4(low)
        x4, x5, x6, x7 = _split4(high)
        low, high = _halves(m)
        m0, m1, m2, m3 = _split4(low)
        m4, m5, m6, m7 = _split4(high)
        scales = tl.full([4, 8, 4], 1.0, tl.float32) * scale
        m0, m1, m2, m3, m4, m5, m6, m7, a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
            MAX_32, MAX_IO_32,
            [
                x0, x1, x2, x3, x4, x5, x6, x7, m0, m1, m2, m3, m4, m5, m6, m7, scales,
                tl.reshape(lane, [4, 8, 4]),
            ],
            (tl.float32,) * 16, True, 1,
        )  # fmt: skip
        m = _whole(_join4(m0, m1, m2, m3), _join4(m4, m5, m6, m7))
        return m, _whole(_join4(a0, a1, a2, a3), _join4(a4, a5, a6, a7))
    else:
        new = tl.maximum(m, tl.max(tl.max(own, 1), 0)[None, None, :] * scale)
        return new, tl.exp2(m - new)


@triton.jit
def by_lane(x, ROWS: tl.constexpr, N: tl.constexpr):
    """A tile of 64 tokens or of ``ROWS`` channels, ``[ROWS, N]``, as the lanes hold it."""
    return tl.reshape(x, [ROWS // 64, 4, 2, 8, N])


@triton.jit
def per_row(x):
    """``[4, 8, N]`` for :func:`by_lane`."""
    return x[None, :, None, :, :]
