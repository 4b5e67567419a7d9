"""float32 tensors: the upper 16 bits of each number packed as bf16, the lower 16 kept as they
are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..kernels.exponent_unpack import block_view
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

    def decode(self, packed: PackedBlocks, out: torch.Tensor) -> None:
        blocks = packed.lead_shape[0]
        upper = out.new_empty(
            (*out.shape[:2], blocks * self.block_tokens, out.shape[3]), dtype=torch.int16
        )
        self.upper.decode(packed, upper)
        target = block_view(out, blocks, self.block_tokens)
        target.copy_(block_view(upper, blocks, self.block_tokens))
        target.bitwise_left_shift_(16)
        target.bitwise_or_(packed.planes["lower"].to(torch.int32).bitwise_and_(0xFFFF))

    def check(self, packed: PackedBlocks, head_dim: int) -> None:
        self.upper.check(packed, head_dim)
        packed.check({"lower": ((self.block_tokens, head_dim), torch.int16)}, {})
