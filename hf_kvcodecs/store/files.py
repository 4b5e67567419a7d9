"""A chunk as the bytes of a safetensors file, for every tier behind the first.

Format (version 1)
------------------
Metadata: ``format`` = "hf_kvcodecs.chunk", ``version`` = "1", ``chunk`` = a JSON object with
``parent`` (hex), ``position``, ``ids`` (a list) and ``packed`` (what
:func:`hf_kvcodecs.store.packing.unpack` needs), ``sha256`` = the digest (hex) of ``chunk`` and of
every tensor in the order of their names: name, dtype, shape, bytes. Tensors: those of
:func:`hf_kvcodecs.store.packing.pack`. The names ``chain`` and ``content`` are not written: they
follow from the ids, the parent and the salt, so that a file under another name, or of another
model, cannot pass for this one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..errors import CorruptDataError, UnsupportedLayoutError
from ..layouts import check_version
from .chunk import Chunk
from .packing import Packed

FORMAT, VERSION = "hf_kvcodecs.chunk", 1
HEAD_BYTES = 1 << 16  # read at first to learn what a file holds


def to_bytes(chunk: Chunk, packed: Packed) -> bytes:
    """The file of a chunk."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in packed[0].items()}
    described = json.dumps(
        {
            "parent": chunk.parent.hex(),
            "position": chunk.position,
            "ids": chunk.ids.tolist(),
            "packed": packed[1],
        }
    )
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "chunk": described,
        "sha256": _digest(described, tensors),
    }
    data: bytes = save(tensors, metadata)
    return data


def from_bytes(salt: bytes, chain: bytes, data: bytes) -> tuple[Chunk, Packed]:
    """The chunk that must be named ``chain``, and its packed tensors.

    Raises:
        CorruptDataError: truncated or altered bytes, or another chunk's.
        UnsupportedLayoutError: the file of a newer release.
    """
    metadata = _metadata(data)
    chunk, described = _chunk(salt, chain, metadata)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise CorruptDataError(f"a chunk's file is truncated or damaged ({error})") from error
    if metadata.get("sha256") != _digest(metadata["chunk"], tensors):
        raise CorruptDataError("a chunk's file does not match its checksum")
    return chunk, (tensors, described)


def head_bytes(head: bytes) -> int:
    """How many bytes the description of a file takes, told from its first eight."""
    return 8 + int.from_bytes(head[:8], "little")


def read_chunk(salt: bytes, chain: bytes, head: bytes) -> Chunk:
    """The chunk that a file's description (``head``, at least that) tells of; tensors unread."""
    return _chunk(salt, chain, _metadata(head))[0]


def checked_chunk(data: bytes, *, whole: bool) -> int | None:
    """The tokens of a chunk's file, None if it is damaged or of a newer release.

    For tools that know no salt: with ``whole`` the checksum is checked, the name never is.
    """
    try:
        metadata = _metadata(data)
        tokens = len(json.loads(metadata["chunk"])["ids"])
        if whole and metadata.get("sha256") != _digest(metadata["chunk"], load(data)):
            return None
    except (CorruptDataError, UnsupportedLayoutError, SafetensorError, ValueError, LookupError):
        return None
    return tokens


def _metadata(data: bytes) -> dict[str, str]:
    if len(data) < 8 or len(data) < head_bytes(data):
        raise CorruptDataError("a chunk's file is truncated")
    try:
        metadata = json.loads(data[8 : head_bytes(data)])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise CorruptDataError("a safetensors file, but not a chunk's")
        version, _ = metadata["version"], metadata["chunk"]
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptDataError(f"a chunk's file has no readable header ({error!r})") from error
    known = isinstance(version, str) and version.isascii() and version.isdigit()
    check_version("chunk file", int(version[:9]) if known else -1, VERSION)
    return dict(metadata)


def _chunk(salt: bytes, chain: bytes, metadata: dict[str, str]) -> tuple[Chunk, dict[str, Any]]:
    try:
        described = json.loads(metadata["chunk"])
        ids = np.array(described["ids"], np.int64)
        parent = bytes.fromhex(described["parent"])
        chunk = Chunk.make(salt, parent, ids, int(described["position"]))
        packed: dict[str, Any] = described["packed"]
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise CorruptDataError(f"a chunk's description makes no sense ({error!r})") from error
    if not isinstance(packed, dict):
        raise CorruptDataError("a chunk's description does not say how it is packed")
    if chunk.chain != chain or ids.ndim != 1 or not len(ids):
        raise CorruptDataError("a file under a name that is not its chunk's")
    return chunk, packed


def _digest(described: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
