"""Attention that reads packed history as it is."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ...errors import UnsupportedLayoutError
from ..dispatch import capability, launch_options, on_device, triton_missing
from ..register_blocks import BLOCK_TOKENS, TILE_TOKENS, RegisterBlocks

MAX_QUERY_TOKENS = 64
MAX_GROUP = 16
MAX_SPLITS = 256
HEAD_DIMS = (64, 80, 96, 128, 256)

__all__ = ["packed_attention", "unsupported_reason"]


def unsupported_reason(
    q: torch.Tensor, blocks: RegisterBlocks, scale: float | None = None
) -> str | None:
    """Why :func:`packed_attention` cannot take these, or None if it can. Nothing is launched."""
    missing = triton_missing(q.device)
    if missing:
        return missing
    if q.dtype != torch.bfloat16:
        return f"queries of {q.dtype}: only bfloat16 has a fused path"
    if q.dim() != 4 or q.shape[3] != blocks.head_dim:
        return (
            f"queries of shape {tuple(q.shape)}: expected [batch, q_heads, q_tokens, "
            f"{blocks.head_dim}]"
        )
    if q.shape[3] not in HEAD_DIMS:
        return f"head_dim {q.shape[3]}: the fused path takes {', '.join(map(str, HEAD_DIMS))}"
    if q.device != blocks.table.device:
        return f"queries on {q.device}: the blocks are on {blocks.table.device}"
    batch, kv_heads, _ = blocks.table.shape
    group, rest = divmod(q.shape[1], kv_heads)
    if q.shape[0] != batch or rest or not 1 <= group <= MAX_GROUP:
        return (
            f"{q.shape[0]} rows of {q.shape[1]} query heads over {batch} rows of {kv_heads} KV "
            f"heads: expected equal rows and 1 to {MAX_GROUP} query heads per KV head"
        )
    if batch == 0:
        return "a batch of no rows"
    if not 1 <= q.shape[2] <= MAX_QUERY_TOKENS:
        return f"{q.shape[2]} query tokens: the fused path takes 1 to {MAX_QUERY_TOKENS}"
    if scale is not None and not 0 < scale < math.inf:
        return f"scale {scale}: the fused path takes positive numbers"
    return None


def packed_attention(
    q: torch.Tensor,
    blocks: RegisterBlocks,
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    *,
    scale: float | None = None,
    sealed: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    sealed_visible: bool = False,
    splits: int | None = None,
    ring: bool = False,
    lost: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax attention over sealed blocks and a dense tail, in one softmax.

    The queries are the last ``q_tokens`` of each row's sequence: query ``i`` sees the tokens up to
    ``length - q_tokens + i``. No dense copy of the history is made and nothing waits for the
    device.

    Args:
        q: bf16 ``[batch, q_heads, q_tokens, head_dim]``; 1 to 64 tokens, head_dim 64, 80, 96, 128
            or 256 (80 and 96 read raw blocks only), any strides with head_dim contiguous.
        blocks: sealed history of ``q_heads / group`` KV heads, group 1 to 16.
        tail_keys, tail_values: bf16 ``[batch, kv_heads, capacity, head_dim]``, the tokens behind
            the sealed blocks.
        scale: positive; ``head_dim ** -0.5`` if None.
        sealed: int32 ``[batch]`` on the device, each row's sealed blocks; ``blocks.blocks`` if
            None.
        lengths: int32 ``[batch]``, each row's tokens, tail included; sealed blocks and a full
            ``tail_keys`` if None.
        starts: int32 ``[batch]``, each row's first token that is seen (left padding); 0 if None.
        window: a query sees this many tokens, itself included; all if None.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[q_heads]``, a logit per head that joins the softmax and adds no value.
        sealed_visible: a promise that no query is so early in its row that sealed tokens follow it
            (always so for one query token, or without ``lengths`` where the tail holds all of
            them): spares the causal mask.
        splits: programs that share a row's history; by default as many as fill the device.
        ring: token ``t`` is at ``t % capacity`` of the tail, capacity a multiple of 128.
        lost: int32 ``[1]`` on the device, for errors that nobody else knows of. If it is not 0 the
            whole output is NaN.
        ends: int32 ``[batch]``, beside ``lost`` and ``starts``: a row whose entry is not its
            length, or in ``starts`` is negative, gets NaN.

    Returns:
        bf16 ``[batch, q_heads, q_tokens, head_dim]``, contiguous in ``[batch, q_tokens, q_heads,
        head_dim]`` order as transformers uses it. A query that sees nothing gets zeros.

    Raises:
        UnsupportedLayoutError: what :func:`unsupported_reason` names.
        ValueError: the tail's shape or dtype, or options out of range.

    Split-KV decoding follows FlashDecoding (Dao et al., 2023); decoding inside attention follows
    GAAC (arXiv 2610.38210), with another word order (see ``register_blocks``).
    """
    reason = unsupported_reason(q, blocks, scale)
    if reason:
        raise UnsupportedLayoutError(f"packed_attention cannot take {reason}. Use dense attention.")
    batch, q_heads, q_tokens, head_dim = q.shape
    _, kv_heads, table_blocks = blocks.table.shape
    for name, tail in (("tail_keys", tail_keys), ("tail_values", tail_values)):
        shape = (batch, kv_heads, tail_keys.shape[2], head_dim)
        if tail.dtype != q.dtype or tuple(tail.shape) != shape or tail.device != q.device:
            raise ValueError(
                f"{name}: expected {q.dtype} {shape} on {q.device}, got {tail.dtype} "
                f"{tuple(tail.shape)} on {tail.device}"
            )
    if sealed is not None and lengths is None:
        raise ValueError("sealed: expected lengths beside it, since rows differ then; got none")
    if ring and (lengths is None or sealed is None or tail_keys.shape[2] % BLOCK_TOKENS):
        raise ValueError(
            f"ring: expected lengths, sealed and a capacity that is a multiple of {BLOCK_TOKENS}; "
            f"got a capacity of {tail_keys.shape[2]}"
        )
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected None or a positive number, got {value}")

    def rows(x: torch.Tensor | None, default: int) -> torch.Tensor | int:
        return default if x is None else x.to(device=q.device, dtype=torch.int32).contiguous()

    from .kernel import _merge_kernel, _packed_attention_kernel

    q, tail_keys, tail_values = (_aligned(x) for x in (q, tail_keys, tail_values))
    columns = q_heads // kv_heads * q_tokens
    plan = _plan(q.device, batch * kv_heads, columns, head_dim, table_blocks)
    splits = plan.splits if splits is None else splits
    part = torch.empty(
        (batch * kv_heads * columns, splits, head_dim), dtype=torch.float32, device=q.device
    )
    stat = torch.empty(
        (batch * kv_heads * columns, splits, 2), dtype=torch.float32, device=q.device
    )
    out = torch.empty((batch, q_tokens, q_heads, head_dim), dtype=q.dtype, device=q.device)
    out = out.transpose(1, 2)
    scale = head_dim**-0.5 if scale is None else scale
    sealed_visible |= lengths is None and tail_keys.shape[2] >= q_tokens
    # What hides sealed tokens: nothing, a first visible token per row, or more.
    edges = (
        2
        if q_tokens > 1 and (window or not sealed_visible)
        else int(bool(window) or starts is not None)
    )
    width = max(_next_power_of_2(head_dim), 64)
    options = launch_options(q.device)
    # Programmatic dependent launch: the merge is launched while the main kernel ends.
    starts_of_rows = rows(starts, 0)
    pdl = options["PTX"] and capability(q.device) >= 9
    wgmma = options["PTX"] and capability(q.device) == 9
    with on_device(q.device):
        _packed_attention_kernel[(splits, batch * kv_heads, -(-columns // plan.block_n))](
            q, blocks.words, blocks.pool, blocks.table, blocks.raw.view(torch.bfloat16),
            blocks.raw_list, blocks.raw_count, tail_keys, tail_values,
            rows(lengths, blocks.blocks * BLOCK_TOKENS + tail_keys.shape[2]),
            rows(sealed, blocks.blocks), starts_of_rows, part, stat,
            scale if softcap else scale * math.log2(math.e), softcap or 0.0,
            kv_heads, q_heads, q_tokens, table_blocks, splits,
            *q.stride()[:3], *tail_keys.stride()[:3], *tail_values.stride()[:3],
            HEAD_DIM=head_dim, D=width, N=plan.block_n, LENGTHS=lengths is not None,
            SEALED=sealed is not None, STARTS=starts is not None,
            WINDOW=window or 0,
            EDGES=edges,
            SOFTCAP=softcap is not None, PACKED=blocks.packable, SLOT=blocks.words.shape[1],
            RING=tail_keys.shape[2] if ring else 0, STAGES=plan.stages, WGMMA=wgmma, PDL=pdl,
            num_warps=4, **options,
            **({"maxnreg": plan.registers} if options["PTX"] else {}),
        )  # fmt: skip
        # Few heads: share out their channels too, so that the merge fills more of the device.
        block_d = 32 if batch * q_heads * q_tokens <= 128 else width
        _merge_kernel[(batch * kv_heads, columns, -(-head_dim // block_d))](
            part, stat, q if sinks is None else sinks, stat if lost is None else lost,
            stat if ends is None else starts_of_rows, rows(ends, 0), rows(lengths, 0),
            out, kv_heads, q_heads, q_tokens, splits,
            *out.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_D=block_d, S=_next_power_of_2(splits),
            SINKS=sinks is not None, LOST=lost is not None, ENDS=ends is not None, PDL=pdl,
            num_warps=4 if splits <= 64 else 8,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """Columns per program, programs per row of the cache, registers per lane, pipeline stages."""

    block_n: int
    splits: int
    registers: int
    stages: int


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, rows: int, columns: int, head_dim: int, blocks: int) -> _Plan:
    """One wave over the device's multiprocessors, at least a block for each program.

    Measured on an H200: three programs of 168 registers beat four of 128 from 8K to 128K tokens
    (not with head_dim 64), and more splits than one wave lose everywhere.
    """
    block_n = min(max(16, _next_power_of_2(columns)), 64)
    rows *= -(-columns // block_n)
    wave = _multiprocessors(device)
    programs, registers = 2, 255
    if block_n <= 32 and head_dim <= 128:
        programs, registers = (4, 128) if head_dim <= 64 and block_n == 16 else (3, 168)
    stages = 5 if head_dim <= 128 else 4
    splits = max(1, min(programs * wave // rows, blocks, MAX_SPLITS))
    return _Plan(block_n, splits, registers, stages)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, or a copy where rows do not begin at multiples of 16 bytes."""
    strides_fit = all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and strides_fit and x.data_ptr() % 16 == 0 else x.contiguous()


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


assert TILE_TOKENS * 2 == BLOCK_TOKENS
