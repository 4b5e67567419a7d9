"""A packed cache as a safetensors file.

Format (version 1)
------------------
Metadata: ``format`` = "hf_kvcodecs.gaac_cache", ``version`` = "1", ``description`` = a JSON object,
``sha256`` = the digest (hex) of the description and of every tensor, in the order of their names:
name, dtype, shape, bytes.

The description holds ``options`` (of :class:`GAACCache`), ``model`` (null, or ``name`` and the
``config_sha256`` of the config's fields) and ``layers``, one object each: ``kind`` is "gaac",
"empty", "sliding" or "dummy". A "gaac" layer has ``sequences``: one of keys and values together
(the values' rows of the batch behind the keys'), or two; each has ``dtype``, ``codec`` (a codec's
config) and ``segments`` (a codec's config each). Tensors of sequence ``S`` of layer ``I``:
``layers.I.S.tail`` (words), ``layers.I.S.J.planes.NAME``, ``.pools.NAME``, ``.counts.NAME`` for
segment ``J``; the codec owns what they hold. A "sliding" layer has ``cumulative_length`` and the
tensors ``layers.I.keys`` and ``layers.I.values`` in the model's dtype.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..codecs import codec_from_config
from ..codecs.words import WORD_DTYPES
from ..errors import CacheMisuseError, CorruptDataError, KVCodecsError, UnsupportedLayoutError
from ..layouts import PackedBlocks, check_version
from .layer import KV_DTYPES, GAACLayer
from .pair import KVPair
from .sequence import PackedSequence, Segment

if TYPE_CHECKING:
    from .gaac import GAACCache

FORMAT, VERSION = "hf_kvcodecs.gaac_cache", 1
POOL_COUNTS = {"escapes": "escapes", "patch_index": "patches", "patch_bits": "patches"}


def save_cache(cache: GAACCache, path: str | os.PathLike[str]) -> None:
    """See :meth:`GAACCache.save`."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: expected the name of a file in a folder that exists")
    if not _layers_agree(cache):
        raise ValueError(
            "save: the layers of this cache hold different batch sizes or lengths, so no model "
            "could go on from it. Was it used with a model of another depth?"
        )
    tensors: dict[str, torch.Tensor] = {}
    layers = [
        _describe_layer(layer, f"layers.{i}", tensors) for i, layer in enumerate(cache.layers)
    ]
    options = {"block_tokens": cache.options.block_tokens, "kv_dtype": cache.options.kv_dtype,
               "pack_from": cache.options.pack_from}  # fmt: skip
    description = json.dumps(
        {"options": options, "model": model_identity(cache.config), "layers": layers}
    )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "description": description,
        "sha256": _digest(description, tensors),
    }
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_cache(
    cls: type[GAACCache],
    path: str | os.PathLike[str],
    device: torch.device,
    config: PreTrainedConfig | None,
) -> GAACCache:
    """See :meth:`GAACCache.load`."""
    description, tensors = _read(Path(path))
    _check_model(description["model"], model_identity(config), path)
    try:
        cache = cls(config, **description["options"])
        layers = description["layers"]
        if config is not None and len(cache.layers) != len(layers):
            raise CacheMisuseError(
                f"{path}: {len(layers)} layers, but the given model has {len(cache.layers)}"
            )
        for idx, described in enumerate(layers):
            if idx == len(cache.layers):
                cache.layers.append(GAACLayer(cache.options))
            _fill_layer(cache.layers[idx], described, f"layers.{idx}", tensors, device)
    except KVCodecsError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CorruptDataError(
            f"{path}: the description of its layers makes no sense ({error!r})"
        ) from error
    if tensors:
        raise CorruptDataError(
            f"{path}: tensors that nothing describes: {', '.join(sorted(tensors)[:4])}"
        )
    if not _layers_agree(cache):
        raise CorruptDataError(f"{path}: its layers hold different batch sizes or lengths")
    return cache


# The config fields that decide what keys and values are; others differ between releases and uses.
IDENTITY_FIELDS = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size layer_types sliding_window max_position_embeddings "
    "rope_theta rope_scaling rope_parameters"
)


def model_identity(config: PreTrainedConfig | None) -> dict[str, str] | None:
    """What tells models apart: the last part of the name, and a digest of ``IDENTITY_FIELDS``."""
    if config is None:
        return None
    text_config = config.get_text_config(decoder=True)
    fields = {name: getattr(text_config, name, None) for name in IDENTITY_FIELDS.split()}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
    return {"name": Path(config.name_or_path or "").name, "config_sha256": digest}


def _check_model(saved: dict[str, str] | None, given: dict[str, str] | None, path: Any) -> None:
    if saved is None or given is None:
        return
    for what in ("config_sha256", "name"):
        if saved.get(what) != given[what]:
            raise CacheMisuseError(
                f"{path} was filled by another model: {what} {saved.get(what)!r}, given "
                f"{given[what]!r}. Use it with "
                "the model that filled it (the same weights, in a folder of the same name), or "
                "fill a new cache"
            )


def _describe_layer(layer: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One layer's description; its tensors go into ``tensors``."""
    if isinstance(layer, GAACLayer):
        if not layer.is_initialized:
            return {"kind": "empty"}
        sequences = enumerate(layer.sequences)
        return {
            "kind": "gaac",
            "sequences": [_describe_sequence(s, f"{prefix}.{j}", tensors) for j, s in sequences],
        }
    if type(layer) is DynamicSlidingWindowLayer:
        if not layer.is_initialized:
            return {"kind": "empty"}
        held = {"keys": layer.keys, "values": layer.values}
        tensors.update({f"{prefix}.{name}": t for name, t in held.items() if t is not None})
        return {"kind": "sliding", "cumulative_length": int(layer.cumulative_length)}
    if type(layer).__name__ == "DummyLayer":
        return {"kind": "dummy"}
    raise ValueError(
        f"{prefix}: a {type(layer).__name__} cannot be saved; only attention layers can"
    )


def _describe_sequence(
    sequence: PackedSequence, prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    tensors[f"{prefix}.tail"] = sequence.tail
    for j, segment in enumerate(sequence.segments):
        tensors.update({f"{prefix}.{j}.{name}": t for name, t in segment.packed.tensors.items()})
    return {
        "dtype": str(sequence.dtype).removeprefix("torch."),
        "codec": sequence.codec.config(),
        "segments": [segment.codec.config() for segment in sequence.segments],
    }


def _fill_layer(
    layer: Any,
    described: dict[str, Any],
    prefix: str,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Gives ``layer`` what ``described`` and ``tensors`` hold; the tensors used are taken out of
    ``tensors``."""
    kind = described["kind"]
    if kind in ("empty", "dummy"):
        return
    if kind == "gaac" and isinstance(layer, GAACLayer):
        backend = layer.options.backend
        sequences = tuple(
            _read_sequence(sequence, f"{prefix}.{j}", tensors, backend)
            for j, sequence in enumerate(described["sequences"])
        )
        if len({sequence.shape[:3] for sequence in sequences}) != 1 or len(sequences) > 2:
            raise CorruptDataError(f"{prefix}: its sequences do not belong together")
        if len(sequences) == 1 and sequences[0].shape[0] % 2:
            raise CorruptDataError(f"{prefix}: keys and values together have an odd number of rows")
        layer.pair = KVPair(sequences)
        layer.move(device)
    elif kind == "sliding" and type(layer) is DynamicSlidingWindowLayer:
        keys, values = (
            tensors.pop(f"{prefix}.keys").to(device),
            tensors.pop(f"{prefix}.values").to(device),
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layer.cumulative_length = int(described["cumulative_length"])
    elif kind in ("gaac", "sliding"):
        raise CacheMisuseError(
            f"{prefix}: the file has a {kind} layer here, the cache a {type(layer).__name__}. Pass "
            "config=model.config "
            "of the model that filled it"
        )
    else:
        raise UnsupportedLayoutError(f"{prefix}: unknown kind of layer {kind!r}")


def _read_sequence(
    described: dict[str, Any], prefix: str, tensors: dict[str, torch.Tensor], backend: str
) -> PackedSequence:
    codec = _codec({**described["codec"], "backend": backend}, prefix)
    tail = tensors.pop(f"{prefix}.tail")
    if tail.dim() != 4 or tail.dtype != codec.word_dtype:
        raise CorruptDataError(
            f"{prefix}.tail: expected four axes of {codec.word_dtype}, got {tail.dtype} "
            f"{tail.shape}"
        )
    segments = []
    for j, config in enumerate(described["segments"]):
        segment_codec = _codec({**config, "backend": backend}, prefix)
        packed = _read_blocks(f"{prefix}.{j}.", tensors)
        segment_codec.check(packed, tail.shape[3])
        if packed.lead_shape[:2] != tail.shape[:2] or segment_codec.dtype != codec.dtype:
            raise CorruptDataError(
                f"{prefix}: segment {j} has another batch, number of heads or dtype than the tail"
            )
        segments.append(Segment(codec=segment_codec, packed=packed))
    dtype = getattr(torch, described["dtype"], None)
    if dtype not in WORD_DTYPES or (dtype != codec.dtype and codec.dtype not in KV_DTYPES.values()):
        raise CorruptDataError(
            f"{prefix}: states of {described['dtype']!r} cannot be stored as {codec.dtype}"
        )
    return PackedSequence(codec=codec, dtype=dtype, segments=tuple(segments), tail=tail)


def _codec(config: dict[str, Any], prefix: str) -> Any:
    try:
        return codec_from_config(config)
    except UnsupportedLayoutError:
        raise
    except ValueError as error:
        raise CorruptDataError(f"{prefix}: {error}") from error


def _read_blocks(prefix: str, tensors: dict[str, torch.Tensor]) -> PackedBlocks:
    def take(group: str) -> dict[str, torch.Tensor]:
        start = f"{prefix}{group}."
        return {
            name.removeprefix(start): tensors.pop(name)
            for name in list(tensors)
            if name.startswith(start)
        }

    planes, pools, counts = take("planes"), take("pools"), take("counts")
    if not planes or any(plane.dim() < 3 for plane in planes.values()):
        raise CorruptDataError(
            f"{prefix}planes: missing, or without the axes batch, kv_heads, blocks"
        )
    return PackedBlocks(
        planes=planes, pools=pools, counts=counts, pool_counts={n: POOL_COUNTS[n] for n in pools}
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description and tensors of a file whose digest is right."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; GAACCache.save(path) writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CorruptDataError(
                    f"{path}: a safetensors file, but not one that GAACCache.save wrote"
                )
            version = metadata.get("version", "")
            check_version(
                f"{path}: cache file",
                int(version) if version in map(str, range(1000)) else -1,
                VERSION,
            )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CorruptDataError(
            f"{path}: not a readable safetensors file, truncated perhaps ({error})"
        ) from error
    description = metadata.get("description", "")
    if metadata.get("sha256") != _digest(description, tensors):
        raise CorruptDataError(
            f"{path}: its contents do not match its checksum: the file is damaged"
        )
    try:
        described = json.loads(description)
    except json.JSONDecodeError as error:
        raise CorruptDataError(f"{path}: its description is no JSON ({error})") from error
    wanted = {"options": dict, "model": dict | None, "layers": list}
    if not isinstance(described, dict) or not all(
        name in described and isinstance(described[name], kind) for name, kind in wanted.items()
    ):
        raise CorruptDataError(f"{path}: its description is not the one that save writes")
    return described, tensors


def _digest(description: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def _layers_agree(cache: GAACCache) -> bool:
    """Whether all packed layers hold the same batch and tokens."""
    filled = [la for la in cache.layers if isinstance(la, GAACLayer) and la.is_initialized]
    return len({layer.pair.shape(0)[::2] for layer in filled}) <= 1
