"""Attention of one token over what each head has kept: segments of one flat buffer, as long as each
head's selection, with a tail whose length is on the device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..dispatch import interpreted, on_device, triton_missing
from .reference import ragged_attention_reference

CODES = 32  # to a group, and to as many words as a code has bits
PACKED_BITS = (2, 4, 8)  # those that divide a word
HEAD_DIMS = (64, 128, 256)
GROUP_LIMIT = 16
PROGRAMS = 264  # two for each of an H200's processors
BLOCK_T = 64


def unsupported_reason(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> str | None:
    """Why :func:`ragged_attention` cannot take these, or None."""
    missing = triton_missing(q.device)
    if missing:
        return missing
    if q.dtype != keys.dtype or q.dtype != values.dtype:
        return f"different dtypes: {q.dtype}, {keys.dtype}, {values.dtype}"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype}"
    if keys.shape != values.shape or keys.shape[1] not in HEAD_DIMS:
        return f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
    if q.shape[1] > GROUP_LIMIT:
        return f"{q.shape[1]} query heads to a KV head"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSegments:
    """Quantised tokens of all heads, head after head: a code ``c`` is ``c * scale + minimum``.

    Every 32 codes lie in as many words as a code has bits, the words of one place together; keys
    have a scale for 32 tokens of a channel, values for 32 channels of a token.

    Attributes:
        key_words: int32 ``[bits, tokens // 32, head_dim]``.
        key_scale, key_minimum: fp16 ``[tokens // 32, head_dim]``.
        value_words: int32 ``[bits, tokens, head_dim // 32]``.
        value_scale, value_minimum: fp16 ``[tokens, head_dim // 32]``.
        starts, counts: int64 ``[kv_heads]``: each head's first token and how many it has,
            multiples of 32.
    """

    key_words: torch.Tensor
    key_scale: torch.Tensor
    key_minimum: torch.Tensor
    value_words: torch.Tensor
    value_scale: torch.Tensor
    value_minimum: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @property
    def bits(self) -> int:
        return self.key_words.shape[0]

    @property
    def tokens(self) -> int:
        return self.value_words.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As the kernel takes them."""
        return (
            self.key_words, self.key_scale, self.key_minimum, self.value_words, self.value_scale,
            self.value_minimum, self.starts, self.counts,
        )  # fmt: skip

    def unsupported_reason(self, head_dim: int) -> str | None:
        """Why the kernel cannot read them, or None."""
        groups, words = self.tokens // CODES, head_dim // CODES
        shapes = [(self.bits, groups, head_dim), *2 * [(groups, head_dim)]]
        shapes += [(self.bits, self.tokens, words), *2 * [(self.tokens, words)]]
        if self.bits not in PACKED_BITS:
            return f"codes of {self.bits} bits"
        found = [tuple(part.shape) for part in self.tensors[:6]]
        if found != shapes or self.tokens % CODES or head_dim % CODES:
            return f"quantised tokens of shapes {found}; expected {shapes}"
        if not all(part.is_contiguous() for part in self.tensors):
            return "quantised tokens that are not contiguous"
        return None


def ragged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    cursor: torch.Tensor,
    scale: float,
    packed: PackedSegments | None = None,
) -> torch.Tensor:
    """What one token attends to, in two launches of fixed shape: made for CUDA graphs.

    Args:
        q: ``[kv_heads, group, head_dim]``, contiguous.
        keys, values: ``[rows, head_dim]``, contiguous: all heads' segments.
        starts: int64 ``[kv_heads]``: the first row of each head.
        counts: int64 ``[kv_heads]``: rows of each head before its tail.
        cursor: int64 ``[1]``: the newest row of the tails; head ``h`` sees rows
            ``starts[h] .. starts[h] + counts[h] + cursor``.
        scale: of the products.
        packed: quantised tokens that each head sees as well; they are decoded to ``q``'s dtype as
            they are read.

    Returns:
        ``[kv_heads, group, head_dim]`` of ``q``'s dtype.

    Raises:
        ValueError: what :func:`unsupported_reason` names, or tensors that are not contiguous.
    """
    reason = unsupported_reason(q, keys, values)
    if reason is None and packed is not None:
        reason = packed.unsupported_reason(q.shape[2])
    if reason is not None:
        raise ValueError(f"ragged_attention cannot take {reason}")
    if not (q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("q, keys, values: expected contiguous tensors; call .contiguous()")
    from .kernel import _ragged_attention_kernel, _ragged_merge_kernel

    heads, group, head_dim = q.shape
    # A power of two, for the merge holds all splits at once.
    splits = 1 << max((PROGRAMS // heads).bit_length() - 1, 0)
    splits = min(splits, 128)
    part = torch.empty((heads, splits, GROUP_LIMIT, head_dim), device=q.device)
    stat = torch.empty((heads, splits, GROUP_LIMIT, 2), device=q.device)
    out = torch.empty_like(q)
    # Without quantised tokens their places are filled by what is at hand; none is read.
    quantised = 8 * (counts,) if packed is None else packed.tensors
    tokens = 0 if packed is None else packed.tokens
    with on_device(q.device):
        _ragged_attention_kernel[(heads, splits)](
            q, keys, values, starts, counts, cursor, *quantised, tokens // CODES, tokens,
            part, stat, scale * math.log2(math.e), group,
            SPLITS=splits, G=GROUP_LIMIT, D=head_dim, BLOCK_T=BLOCK_T if head_dim < 256 else 32,
            BITS=0 if packed is None else packed.bits, UPCAST=interpreted(), num_warps=4,
        )  # fmt: skip
        _ragged_merge_kernel[(heads, group)](
            part, stat, out, group, SPLITS=splits, G=GROUP_LIMIT, D=head_dim, num_warps=4
        )
    return out


@functools.cache
def ragged_attention_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel gives on ``device`` what the reference does; tried once in a process."""
    if device.type != "cuda":  # elsewhere it is interpreted, for tests only
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    q, keys, values = (
        torch.randn(shape, generator=generator).to(dtype).to(device)
        for shape in ((2, 4, head_dim), (700, head_dim), (700, head_dim))
    )
    starts, counts = (torch.tensor(x, device=device) for x in ([0, 500], [430, 90]))
    cursor = torch.tensor([7], device=device)
    try:
        out = ragged_attention(q, keys, values, starts, counts, cursor, 0.1)
        expected = ragged_attention_reference(q, keys, values, starts, counts, cursor, 0.1)
        return bool((out.float() - expected).abs().max() < 0.02)
    except Exception:  # a compiler's errors have no common class
        return False
