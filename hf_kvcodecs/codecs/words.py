"""Numbers as the integers of their bit patterns: where exactness begins."""

from __future__ import annotations

import torch

WORD_DTYPES = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def to_words(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of ``tensor`` as integers of the same size: a view, so that nothing is ever
    converted."""
    return tensor.view(WORD_DTYPES[tensor.dtype])


def from_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of ``dtype`` whose bit patterns ``words`` holds: a view."""
    return words.view(dtype)
