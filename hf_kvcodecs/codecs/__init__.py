"""Tensor codecs: blocks of keys or values to packed bytes and back, by dtype or by config."""

from __future__ import annotations

from typing import Any

import torch

from ..layouts import check_version
from .base import TensorCodec
from .exponent import ExponentCodec
from .raw import RawCodec
from .split_float32 import SplitFloat32Codec
from .words import WORD_DTYPES

__all__ = [
    "CODECS",
    "ExponentCodec",
    "RawCodec",
    "SplitFloat32Codec",
    "TensorCodec",
    "codec_for",
    "codec_from_config",
]

CODECS: dict[str, type[TensorCodec]] = {
    codec.id: codec for codec in (ExponentCodec, SplitFloat32Codec, RawCodec)
}


def codec_for(dtype: torch.dtype, *, block_tokens: int = 128, backend: str = "auto") -> TensorCodec:
    """The strongest exact codec for tensors of ``dtype``: an exponent codec where there is one,
    else raw."""
    if dtype == torch.float32:
        return SplitFloat32Codec(block_tokens=block_tokens, backend=backend)
    float_format = ExponentCodec.FORMATS.get(dtype)
    if float_format is not None:
        return ExponentCodec(float_format=float_format, block_tokens=block_tokens, backend=backend)
    if dtype not in WORD_DTYPES:
        raise TypeError(f"dtype: expected a floating-point dtype of at most 64 bits, got {dtype}")
    return RawCodec(dtype=dtype, block_tokens=block_tokens)


def codec_from_config(config: dict[str, Any]) -> TensorCodec:
    """The codec that :meth:`TensorCodec.config` described.

    Raises:
        ValueError: an unknown codec or option.
        UnsupportedLayoutError: a version newer than this release.
    """
    options = dict(config)
    name, version = options.pop("id", None), options.pop("version", None)
    if name not in CODECS:
        raise ValueError(f"codec id: expected one of {', '.join(CODECS)}, got {name!r}")
    check_version(
        f"codec {name!r}", version if isinstance(version, int) else -1, CODECS[name].version
    )
    try:
        return CODECS[name](**options)
    except TypeError as error:
        raise ValueError(f"codec {name!r}: unknown or missing option ({error})") from error
