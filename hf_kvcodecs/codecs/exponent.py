"""The exponent codec: bf16 (to about 11.3 of 16 bits), fp16 and fp8, without loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import CorruptDataError
from ..kernels.exponent_pack import exponent_pack
from ..kernels.exponent_unpack import exponent_unpack
from ..layouts import EXPONENT_LAYOUTS, WORD_TOKENS, ExponentLayout, PackedBlocks
from .base import TensorCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentCodec(TensorCodec):
    """Signs and mantissas as they are, exponents as short codes relative to each channel's largest.

    Bit-exact for every pattern, NaN payloads, -0, subnormals and infinities included. The bytes are
    written down in :mod:`hf_kvcodecs.layouts`.

    Args:
        float_format: "bf16" | "fp16" | "fp8_e4m3" | "fp8_e5m2". fp16 has 5 exponent bits to save on
            and packs to about 14.3 of 16 bits; fp8 to about 7.0 (E4M3) or 6.1 (E5M2) of 8.
        word_order: "plain".
    """

    id: ClassVar[str] = "exponent"
    FORMATS: ClassVar[dict[torch.dtype, str]] = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float8_e4m3fn: "fp8_e4m3",
        torch.float8_e5m2: "fp8_e5m2",
    }

    float_format: str = "bf16"
    word_order: str = "plain"

    def __post_init__(self) -> None:
        TensorCodec.__post_init__(self)
        if self.float_format not in EXPONENT_LAYOUTS:
            raise ValueError(
                f"float_format: expected one of {', '.join(EXPONENT_LAYOUTS)}, got "
                f"{self.float_format!r}"
            )
        if self.word_order != self.layout.word_order:
            raise ValueError(
                f"word_order: expected {self.layout.word_order!r}, got {self.word_order!r}"
            )

    @property
    def layout(self) -> ExponentLayout:
        return EXPONENT_LAYOUTS[self.float_format]

    @property
    def dtype(self) -> torch.dtype:
        return next(dtype for dtype, name in self.FORMATS.items() if name == self.float_format)

    def encode(self, words: torch.Tensor) -> PackedBlocks:
        return exponent_pack(words, self.layout)

    def decode(self, packed: PackedBlocks, tail: torch.Tensor) -> torch.Tensor:
        return exponent_unpack(packed, self.layout, tail, self.backend)

    def check(self, packed: PackedBlocks, head_dim: int) -> None:
        layout, channels, tokens = self.layout, head_dim + head_dim % 2, self.block_tokens
        planes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "base": ((channels,), torch.uint8),
            "bits": ((tokens // WORD_TOKENS, layout.plane_count, channels), torch.int16),
            "tags": ((tokens // layout.unit_tokens, layout.tag_bytes(channels)), torch.uint8),
        }
        if layout.has_low_bytes:
            planes["low"] = ((tokens // 2, channels), torch.int16)
        pools = {"escapes": layout.escape_dtype}
        if layout.reserve_zero:
            pools |= {"patch_index": torch.int32, "patch_bits": torch.int16}
        packed.check(planes, pools)
        self._check_pools(packed, tokens * channels)

    def _check_pools(self, packed: PackedBlocks, record_elements: int) -> None:
        """The pools agree with the tags, and no patch points outside its record."""
        tags = packed.planes["tags"]
        shifts = torch.arange(0, 8, self.layout.tag_bits, dtype=torch.uint8, device=tags.device)
        tag = (tags.unsqueeze(-1) >> shifts) & (2**self.layout.tag_bits - 1)
        if bool((tag > self.layout.optional_planes).any()):
            raise CorruptDataError(
                "packed array 'tags' names more planes than the format has: the data is damaged"
            )
        if not torch.equal(tag.sum((-3, -2, -1), dtype=torch.int32), packed.counts["escapes"]):
            raise CorruptDataError(
                "packed array 'tags' disagrees with the counts of escapes: the data is damaged"
            )
        index = packed.pools.get("patch_index")
        if (
            index is not None
            and index.numel()
            and not 0 <= int(index.min()) <= int(index.max()) < record_elements
        ):
            raise CorruptDataError(
                "packed pool 'patch_index' points outside its block: the data is damaged"
            )
