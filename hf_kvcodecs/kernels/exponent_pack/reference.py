"""Packing in plain torch: one line per field of the format in :mod:`hf_kvcodecs.layouts`."""

from __future__ import annotations

import torch

from ...layouts import WORD_TOKENS, ExponentLayout, PackedBlocks


def exponent_pack_reference(words: torch.Tensor, layout: ExponentLayout) -> PackedBlocks:
    """See :func:`hf_kvcodecs.kernels.exponent_pack.exponent_pack`; ``head_dim`` is even here."""
    M, top_code = layout.mantissa_bits, 2**layout.window_bits - 1
    x = words.to(torch.int32) & (2**layout.word_bits - 1)
    exponent = (x >> M) & (2**layout.exponent_bits - 1)
    magnitude = x & (2 ** (layout.word_bits - 1) - 1)

    highest = 2**layout.exponent_bits - 1
    if layout.reserve_zero:  # the all-ones exponent is infinity or NaN: never a base
        base = exponent.masked_fill(exponent == highest, 0).amax(-2, keepdim=True)
        code = exponent - base + top_code
        zero = magnitude == 0
        misfit = ~zero & ((code < 1) | (code > top_code) | (exponent == 0) | (exponent == highest))
        code = code.masked_fill(zero, 0).masked_fill(misfit, top_code)
    else:
        base = exponent.amax(-2, keepdim=True)
        code = exponent - base + top_code
        misfit = None

    fixed = (x & (2**M - 1)) | ((code & (2**layout.fixed_code_bits - 1)) << M)
    fixed = fixed | ((x >> (layout.word_bits - 1)) << (M + layout.fixed_code_bits))
    planes = {"base": base.squeeze(-2).to(torch.uint8)}
    first_bit = 0
    if layout.has_low_bytes:
        low = (fixed & 0xFF).unflatten(-2, (-1, 2))
        planes["low"] = _narrow(low[..., 0, :] | (low[..., 1, :] << 8), torch.int16)
        first_bit = 8
    planes["bits"] = torch.stack(
        [
            _bit_plane(fixed >> (first_bit + p), WORD_TOKENS, torch.int16)
            for p in range(layout.plane_count)
        ],
        dim=-2,
    )
    planes["tags"], escapes, escape_counts = _escapes(code, layout)

    pools, counts = {"escapes": escapes}, {"escapes": escape_counts}
    pool_counts = {"escapes": "escapes"}
    if misfit is not None:
        flat = misfit.flatten(-2)  # [batch, kv_heads, blocks, T * D]
        pools["patch_index"] = flat.nonzero()[:, -1].to(torch.int32)
        pools["patch_bits"] = words.contiguous().flatten(-2)[flat]
        counts["patches"] = flat.sum(-1, dtype=torch.int32)
        pool_counts |= {"patch_index": "patches", "patch_bits": "patches"}
    planes = {name: plane.contiguous() for name, plane in planes.items()}  # whatever words' strides
    return PackedBlocks(planes=planes, pools=pools, counts=counts, pool_counts=pool_counts)


def _escapes(
    code: torch.Tensor, layout: ExponentLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tags, pool and counts of the optional planes of ``code`` ``[..., T, D]``."""
    optional = torch.stack(
        [
            _bit_plane(
                code >> (layout.fixed_code_bits + p), layout.unit_tokens, layout.escape_dtype
            )
            for p in range(layout.optional_planes)
        ],
        dim=-1,
    )  # [..., T/U, D, optional_planes]
    all_ones = -1 if layout.escape_dtype == torch.int16 else 0xFF
    order = torch.arange(1, layout.optional_planes + 1, device=code.device)
    tag = ((optional != all_ones) * order).amax(
        -1
    )  # the highest plane with a zero bit, counted from one
    stored = tag.unsqueeze(-1) >= order
    counts = tag.sum((-2, -1), dtype=torch.int32)

    per_byte = 8 // layout.tag_bits
    padded = torch.nn.functional.pad(tag, (0, -tag.shape[-1] % per_byte)).unflatten(
        -1, (-1, per_byte)
    )
    shifts = torch.arange(0, 8, layout.tag_bits, device=code.device)
    return (padded << shifts).sum(-1).to(torch.uint8), optional[stored], counts


def _bit_plane(values: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Bit 0 of ``values`` ``[..., T, D]`` gathered into words ``[..., T/tokens, D]``, bit ``i``
    from token ``i``."""
    bits = (values & 1).unflatten(-2, (-1, tokens))
    shifts = torch.arange(tokens, dtype=torch.int32, device=values.device).unsqueeze(-1)
    return _narrow((bits << shifts).sum(-2, dtype=torch.int32), dtype)


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 to its low 8 or 16 bits."""
    return values.to(dtype)  # torch wraps integers on conversion
