"""Quantisers of draft caches: few bits for each number, scales in fp16."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

CODES = 32  # for which there are as many words as a code has bits
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Codes of ``bits`` bits, ``bits`` words for every 32, with a scale and a minimum for each
    group.

    Attributes:
        words: int32 ``[bits, ..., group // 32]``. Where ``bits`` divides 32, word ``w`` has codes
            ``w * n`` to ``w * n + n - 1``, ``n = 32 // bits``, the first one lowest. For 3 bits
            the words are bit planes: bit ``i`` of word ``w`` is bit ``w`` of code ``i``.
        scale, minimum: fp16 ``[..., 1]``.
    """

    words: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scale.nbytes + self.minimum.nbytes


def quantise(numbers: torch.Tensor, bits: int) -> Quantised:
    """Asymmetric codes for the last dimension of ``numbers`` ``[..., group]``, one scale a row.

    ``group`` is a multiple of 32.
    """
    numbers = numbers.float()
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    limit = torch.finfo(torch.float16).max
    minimum = low.clamp(-limit, limit).half()
    # Rounding of the scale must not push the largest number beyond the last code by much.
    scale = ((high - minimum.float()) / (2**bits - 1)).clamp(1e-7, limit).half()
    scale = scale.clamp_min(torch.finfo(torch.float16).tiny)
    codes = ((numbers - minimum.float()) / scale.float()).round_().clamp_(0, 2**bits - 1).int()
    codes = codes.unflatten(-1, (-1, CODES))
    if CODES % bits:
        shifts = torch.arange(CODES, dtype=torch.int32, device=numbers.device)
        parts = [(((codes >> bit) & 1) << shifts) for bit in range(bits)]
    else:
        per_word = CODES // bits
        shifts = torch.arange(0, CODES, bits, dtype=torch.int32, device=numbers.device)
        parts = [part << shifts for part in codes.split(per_word, -1)]
    words = torch.stack([part.sum(-1, dtype=torch.int32) for part in parts])
    return Quantised(words=words, scale=scale, minimum=minimum)


def dequantise(packed: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """The numbers ``[..., group]`` that the codes stand for."""
    words = packed.words.movedim(0, -1).unsqueeze(-1)  # [..., group // 32, bits, 1]
    bits = words.shape[-2]
    if CODES % bits:
        shifts = torch.arange(CODES, dtype=torch.int32, device=words.device)
        codes = words.new_zeros((*words.shape[:-2], CODES))
        for bit, plane in enumerate(packed.words):
            codes |= ((plane.unsqueeze(-1) >> shifts) & 1) << bit
        codes = codes.flatten(-2)
    else:
        shifts = torch.arange(0, CODES, bits, dtype=torch.int32, device=words.device)
        codes = ((words >> shifts) & (2**bits - 1)).flatten(-3)
    numbers = codes.float() * packed.scale.float() + packed.minimum.float()
    return numbers.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser(ABC):
    """Packs kept tokens of one layer.

    Args:
        bits: 2, 3, 4 or 8 for each number.
        residual_tokens: newest tokens of each head that stay exact.
    """

    name: ClassVar[str]
    token_group: ClassVar[int] = 1  # tokens are packed in multiples of this

    bits: int = 4
    residual_tokens: int = 32

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits: expected one of {BITS}, got {self.bits!r}")
        if self.residual_tokens < 0:
            raise ValueError(f"residual_tokens: expected at least 0, got {self.residual_tokens!r}")

    def packable(self, tokens: int) -> int:
        """How many of a head's ``tokens`` are packed; the newest others stay exact."""
        return max(tokens - self.residual_tokens, 0) // self.token_group * self.token_group

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Quantised, Quantised]:
        """Packs keys and values ``[tokens, head_dim]``; ``tokens`` is a multiple of
        ``token_group``, those of each head together and in order."""

    @abstractmethod
    def decode(
        self, keys: Quantised, values: Quantised, dtype: torch.dtype, head_dims: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[tokens, head_dim]`` of ``dtype``, about as they were."""


def pad_channels(states: torch.Tensor) -> torch.Tensor:
    """``states`` with its last dimension padded to whole words by its last channel."""
    missing = -states.shape[-1] % CODES
    if not missing:
        return states
    return torch.cat([states, states[..., -1:].expand(*states.shape[:-1], missing)], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KIVI(Quantiser):
    """Keys quantised per channel, values per token (KIVI, arXiv 2402.02750).

    Args:
        group_tokens: consecutive tokens of a channel that share a scale (keys), a multiple of 32.

    Values share one for every 32 channels of a token, or for all channels with a
    ``value_group`` of 0. Scales are fp16; residual tokens stay exact.
    """

    name: ClassVar[str] = "kivi"
    token_group: ClassVar[int] = CODES

    group_tokens: int = 32
    value_group: int = 32

    def __post_init__(self) -> None:
        Quantiser.__post_init__(self)
        for option in ("group_tokens", "value_group"):
            value = getattr(self, option)
            if value % CODES or value < 0 or (option == "group_tokens" and not value):
                raise ValueError(f"{option}: expected a multiple of {CODES}, got {value!r}")

    def packable(self, tokens: int) -> int:
        return max(tokens - self.residual_tokens, 0) // self.group_tokens * self.group_tokens

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Quantised, Quantised]:
        by_channel = keys.unflatten(0, (-1, self.group_tokens)).transpose(1, 2)
        by_token = pad_channels(values)
        if self.value_group and by_token.shape[-1] % self.value_group == 0:
            by_token = by_token.unflatten(-1, (-1, self.value_group))
        else:
            by_token = by_token.unflatten(-1, (1, -1))
        return quantise(by_channel, self.bits), quantise(by_token, self.bits)

    def decode(
        self, keys: Quantised, values: Quantised, dtype: torch.dtype, head_dims: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_channel = dequantise(keys, dtype).transpose(1, 2).flatten(0, 1)
        return by_channel, dequantise(values, dtype).flatten(1)[:, : head_dims[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated(Quantiser):
    """Keys and values rotated by a Hadamard matrix, then quantised per token.

    The rotation spreads outlier channels over all of them, so that one scale a token will do
    (QuaRot, arXiv 2404.00456; RotateKV, arXiv 2501.16383, which rotates keys before rotary
    positions; this rotates what the cache holds). Widths that are no power of
    two are rotated in blocks of the largest power of two that divides them.
    """

    name: ClassVar[str] = "rotate"

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Quantised, Quantised]:
        packed = (
            quantise(pad_channels(hadamard(part.float())).unsqueeze(1), self.bits)
            for part in (keys, values)
        )
        return next(packed), next(packed)

    def decode(
        self, keys: Quantised, values: Quantised, dtype: torch.dtype, head_dims: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (
            hadamard(dequantise(part, torch.float32).flatten(1)[:, :width]).to(dtype)
            for part, width in zip((keys, values), head_dims, strict=True)
        )
        return next(parts), next(parts)


def hadamard(states: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension; its own inverse."""
    width = states.shape[-1]
    block = width & -width
    out = states.unflatten(-1, (-1, block))
    half = 1
    while half < block:
        pairs = out.unflatten(-1, (-1, 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        half *= 2
    scaled: torch.Tensor = out * float(block) ** -0.5
    return scaled.flatten(-2)
