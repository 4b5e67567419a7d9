"""Quantised tokens of several heads as the kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CODES = 32  # to a group, and to as many words as a code has bits
PACKED_BITS = (2, 4, 8)  # those that divide a word


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
        dtypes = [part.dtype for part in self.tensors]
        scales = [torch.int32, torch.float16, torch.float16]
        if dtypes != [*scales, *scales, torch.int64, torch.int64]:
            return f"quantised tokens of dtypes {dtypes}"
        if not all(part.is_contiguous() for part in self.tensors):
            return "quantised tokens that are not contiguous"
        return None
