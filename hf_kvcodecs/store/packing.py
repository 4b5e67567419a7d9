"""A chunk's keys and values at rest: as they are, packed without loss, or as int8 or int4."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..codecs import codec_for, codec_from_config
from ..codecs.affine import affine_decode, affine_encode
from ..codecs.words import from_words, to_words
from ..errors import CorruptDataError, UnsupportedLayoutError
from ..layouts import WORD_TOKENS, PackedBlocks
from .chunk import KV

CODECS = (None, "gaac", "int8", "int4")
Packed = tuple[dict[str, torch.Tensor], dict[str, Any]]


def check_codec(codec: str | None) -> None:
    """Raises ``ValueError`` for a codec that there is not."""
    if codec not in CODECS:
        raise ValueError(f"codec: expected one of {CODECS}, got {codec!r}")


def pack(kv: KV, codec: str | None) -> Packed:
    """Tensors of their own memory, and the JSON-able description that :func:`unpack` needs.

    ``kv`` is given away: without a codec the very tensors are kept.
    """
    tensors: dict[str, torch.Tensor] = {}
    described = {}
    for name, states, axis in zip(("keys", "values"), kv, (2, 3), strict=True):
        parts, how = _pack_one(states, codec, axis)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        described[name] = how | {
            "shape": list(states.shape),
            "dtype": str(states.dtype).removeprefix("torch."),
        }
    return tensors, {"codec": codec, **described}


def unpack(tensors: dict[str, torch.Tensor], described: dict[str, Any]) -> KV:
    """Keys and values again; without a codec the very tensors stored, which are not to be changed.

    Raises:
        CorruptDataError: tensors and description contradict each other.
    """
    try:
        keys, values = (
            _unpack_one(_part(tensors, name), described["codec"], described[name])
            for name in ("keys", "values")
        )
    except (CorruptDataError, UnsupportedLayoutError):  # the latter: another release's
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptDataError(f"a chunk's tensors make no sense ({error!r})") from error
    return keys, values


def packed_bytes(tensors: dict[str, torch.Tensor], described: dict[str, Any]) -> int:
    """Bytes that a packed chunk takes, its description included."""
    return sum(tensor.nbytes for tensor in tensors.values()) + len(json.dumps(described))


def _part(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    start = f"{name}."
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def _pack_one(states: torch.Tensor, codec: str | None, axis: int) -> Packed:
    if codec is None:
        # A part of a larger tensor would keep all of that in memory.
        own = states.is_contiguous() and states.untyped_storage().nbytes() == states.nbytes
        return {"dense": states if own else states.clone(memory_format=torch.contiguous_format)}, {}
    if codec != "gaac":
        return affine_encode(states, int(codec.removeprefix("int")), axis), {}
    # One block of the whole chunk, so that hardly a token stays outside.
    block_tokens = states.shape[2] - states.shape[2] % WORD_TOKENS
    words = to_words(states.contiguous())
    if not block_tokens:
        return {"tail": words.clone()}, {"block": None}
    block = codec_for(states.dtype, block_tokens=block_tokens, backend="torch")
    head = words[:, :, :block_tokens].unsqueeze(2)
    packed = block.encode(head)
    if packed.nbytes >= head.nbytes:  # noise, or a dtype without a code
        return {"tail": words.clone()}, {"block": None}
    tail = words[:, :, block_tokens:].clone(memory_format=torch.contiguous_format)
    return {**packed.tensors, "tail": tail}, {
        "block": block.config(),
        "pool_counts": dict(packed.pool_counts),
    }


def _unpack_one(
    parts: dict[str, torch.Tensor], codec: str | None, described: dict[str, Any]
) -> torch.Tensor:
    shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
    if codec is None:
        states = parts["dense"]
    elif codec == "gaac":
        states = from_words(_unpack_words(parts, described, shape), dtype)
    else:
        states = affine_decode(parts, int(codec.removeprefix("int")), shape[-1], dtype)
    if states.shape != shape or states.dtype != dtype:
        raise CorruptDataError(
            f"a chunk's states are {states.dtype} {tuple(states.shape)}, described as {dtype} "
            f"{shape}"
        )
    return states


def _unpack_words(
    parts: dict[str, torch.Tensor], described: dict[str, Any], shape: tuple[int, ...]
) -> torch.Tensor:
    tail = parts["tail"]
    if described["block"] is None:
        return tail
    codec = codec_from_config({**described["block"], "backend": "torch"})
    packed = PackedBlocks(
        planes=_part(parts, "planes"),
        pools=_part(parts, "pools"),
        counts=_part(parts, "counts"),
        pool_counts=described["pool_counts"],
    )
    return codec.decode(packed, tail)
