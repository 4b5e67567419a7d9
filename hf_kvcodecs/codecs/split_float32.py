"""float32: the upper 16 bits of each number packed as bf16, the lower 16 as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..kernels.exponent_unpack import exponent_unpack
from ..layouts import PackedBlocks
from .base import TensorCodec
from .exponent import ExponentCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFloat32Codec(TensorCodec):
    """About 27.3 of 32 bits, exact: only the exponent of a float32 number can be packed.

    Format (version 1): the planes, pools and counts of the bf16 exponent codec (version 1) for the
    upper halves, and one more plane ``lower`` int16 ``[block_tokens, head_dim]``.
    """

    id: ClassVar[str] = "split_float32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def upper(self) -> ExponentCodec:
        return ExponentCodec(
            float_format="bf16", block_tokens=self.block_tokens, backend=self.backend
        )

    def encode(self, words: torch.Tensor) -> PackedBlocks:
        packed = self.upper.encode((words >> 16).to(torch.int16))
        return replace(packed, planes=packed.planes | {"lower": words.to(torch.int16).contiguous()})

    def decode(self, packed: PackedBlocks, tail: torch.Tensor) -> torch.Tensor:
        lower = packed.planes["lower"]
        return exponent_unpack(packed, self.upper.layout, tail, self.backend, lower)

    def check(self, packed: PackedBlocks, head_dim: int) -> None:
        self.upper.check(packed, head_dim)
        packed.check({"lower": ((self.block_tokens, head_dim), torch.int16)}, {})
