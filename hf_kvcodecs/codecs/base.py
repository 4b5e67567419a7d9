"""The contract that every tensor codec keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from ..kernels.dispatch import check_backend
from ..layouts import WORD_TOKENS, PackedBlocks
from .words import WORD_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCodec(ABC):
    """Packs blocks of tokens, and gives them back.

    For every codec with ``exact`` set, ``decode`` returns the very bits that ``encode`` was given:
    compare integer views, since ``torch.equal`` is False on NaN and True for -0 == 0.

    Args:
        block_tokens: tokens of one block, a multiple of 16.
        backend: which implementation unpacks, see :mod:`hf_kvcodecs.kernels.dispatch`. No part of
            the bytes.
    """

    id: ClassVar[str]
    version: ClassVar[int] = 1
    exact: ClassVar[bool] = True

    block_tokens: int = 128
    backend: str = "auto"

    def __post_init__(self) -> None:
        if (
            type(self.block_tokens) is not int
            or self.block_tokens < WORD_TOKENS
            or self.block_tokens % WORD_TOKENS
        ):
            raise ValueError(
                f"block_tokens: expected a multiple of {WORD_TOKENS} of at least {WORD_TOKENS}, "
                "got "
                f"{self.block_tokens!r}; 128 is the usual choice"
            )
        check_backend(self.backend)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors packed."""

    @property
    def word_dtype(self) -> torch.dtype:
        """The integer dtype of their bit patterns."""
        return WORD_DTYPES[self.dtype]

    @abstractmethod
    def encode(self, words: torch.Tensor) -> PackedBlocks:
        """Packs ``words`` ``[batch, kv_heads, blocks, block_tokens, head_dim]`` of ``word_dtype``,
        any strides.

        The result shares no memory with ``words``.
        """

    @abstractmethod
    def decode(self, packed: PackedBlocks, tail: torch.Tensor) -> torch.Tensor:
        """All blocks of ``packed`` and the words ``tail`` behind them, in one new tensor.

        ``tail`` is ``[batch, kv_heads, tail_tokens, head_dim]`` of ``word_dtype`` (no tokens will
        do), on the device of ``packed``; the result is contiguous, of the same kind.
        """

    @abstractmethod
    def check(self, packed: PackedBlocks, head_dim: int) -> None:
        """Raises ``CorruptDataError`` where ``packed`` cannot have come from this codec (before a
        first decode)."""

    def config(self) -> dict[str, Any]:
        """JSON-able description of the bytes; ``codec_from_config`` inverts it."""
        options = asdict(self)
        del options["backend"]
        return {"id": self.id, "version": self.version, **options}
