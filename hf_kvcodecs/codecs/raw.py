"""Blocks as they are: for dtypes without a code, and for blocks that packing would not shrink."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from ..layouts import PackedBlocks
from .base import TensorCodec
from .words import WORD_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCodec(TensorCodec):
    """Format (version 1): one plane ``raw`` of words ``[batch, kv_heads, blocks, block_tokens,
    head_dim]``.

    Args:
        dtype: dtype of the numbers, as a torch dtype or its name ("bfloat16").
    """

    id: ClassVar[str] = "raw"

    dtype: torch.dtype = torch.bfloat16  # a field where the base class has a property

    def __post_init__(self) -> None:
        TensorCodec.__post_init__(self)
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", getattr(torch, self.dtype, None))
        if self.dtype not in WORD_DTYPES:
            raise ValueError(
                f"dtype: expected one of {[str(d) for d in WORD_DTYPES]}, got {self.dtype!r}"
            )

    def encode(self, words: torch.Tensor) -> PackedBlocks:
        return PackedBlocks(planes={"raw": words.clone(memory_format=torch.contiguous_format)})

    def decode(self, packed: PackedBlocks, tail: torch.Tensor) -> torch.Tensor:
        return torch.cat([packed.planes["raw"].flatten(2, 3), tail], dim=2)

    def check(self, packed: PackedBlocks, head_dim: int) -> None:
        packed.check({"raw": ((self.block_tokens, head_dim), self.word_dtype)}, {})

    def config(self) -> dict[str, Any]:
        options = asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}
        del options["backend"]
        return {"id": self.id, "version": self.version, **options}
