"""Which model computed a chunk: a digest of all that decides its keys and values."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

SAMPLES = 4  # numbers of each parameter that are looked at before every prompt
PIECE = 1 << 24  # words summed at a time
# Fields of a config that say where a model came from or how it is used, not what it computes.
IGNORED_FIELDS = ("_name_or_path", "transformers_version", "architectures", "use_cache",
                  "torch_dtype", "dtype", "return_dict", "_commit_hash", "generation_config",
                  "output_attentions", "output_hidden_states", "problem_type",
                  "id2label", "label2id")  # fmt: skip

# Hooks of these packages carry inputs from device to device or note outputs, and change no number.
HARMLESS_HOOKS = ("torch", "transformers", "accelerate")

_digests: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """What changes when a model does, told without reading a single weight: cheap enough for every
    token.

    Args:
        model: config, addresses and versions of parameters and buffers, adapters, hooks.
        around: kind of device and autocast.
        trains: some of its modules are in training mode.
        hooked: modules whose hooks may change what they compute (PEFT's mixed batches, steering).
    """

    model: tuple[Any, ...]
    around: str
    trains: bool
    hooked: tuple[str, ...]


def model_state(model: Any) -> ModelState:
    """The state of ``model`` now, in one walk over its modules."""
    found: list[Any] = [str(vars(model.config))]
    hooked = []
    for module in _modules(model):
        found.append(module.training)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                version = 0 if tensor.is_inference() else tensor._version
                found.append((tensor.data_ptr(), version))
        if _is_adapter(module):
            found.append(_adapter(module))
        if module is not model and (module._forward_pre_hooks or module._forward_hooks):
            hooks = {**module._forward_pre_hooks, **module._forward_hooks}
            if foreign := [key for key, hook in hooks.items() if _may_change_numbers(hook)]:
                found.append(tuple(foreign))
                hooked.append(type(module).__name__)
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return ModelState(
        model=tuple(found),
        around=f"on {kind} autocast {autocast}",
        trains=any(entry is True for entry in found),
        hooked=tuple(hooked),
    )


def model_identity(model: Any, state: ModelState | None = None) -> str:
    """A digest of config, rope settings, attention, dtype, autocast, kind of device (others round
    otherwise), training mode (dropout), every weight and the active adapters.

    The weights are read when they may have changed: before every prompt a few numbers of each
    parameter and the model's ``state`` (:func:`model_state`, None to look now) are compared with
    those of the last time. A change of single numbers behind autograd's back (``.data``) may escape
    that.
    """
    state = state or model_state(model)
    quick = _quick_fingerprint(model, state)
    known = _digests.get(model)
    if known is None or known[0] != quick:
        known = (quick, _full_digest(model))
        _digests[model] = known
    return f"{known[1]} {state.around}"


def _quick_fingerprint(model: Any, state: ModelState) -> str:
    """What changes when the model does, cheap enough for every prompt: no names, no copies."""
    digest = hashlib.sha256(str(state.model).encode())
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for module in _modules(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and (count := tensor.numel()) and tensor.is_contiguous():
                taken, step = min(SAMPLES, count), max(count // SAMPLES, 1)
                offset = tensor.storage_offset() + step // 2
                numbers = tensor.detach().as_strided((taken,), (step,), offset)
                samples.setdefault((tensor.device, tensor.dtype), []).append(numbers)
    for parts in samples.values():
        digest.update(_raw(torch.cat(parts)))
    return digest.hexdigest()


def _modules(model: Any) -> Iterator[Any]:
    """``model.modules()`` without names and nested generators, in about half the time."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        yield module
        waiting.extend(child for child in module._modules.values() if child is not None)


@torch.no_grad()
def _full_digest(model: Any) -> str:
    digest = hashlib.sha256(_settings(model).encode())
    sums = []
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.append(_sums(tensor))
    for device_sums in _by_device(sums):
        digest.update(_raw(device_sums))
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 sums over a tensor's bits, one of them weighted by place."""
    if tensor.device.type == "meta":
        raise ValueError("ChunkReuseCache: this model's weights are not loaded (meta device)")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:  # a part of a larger tensor
        data = data.clone()
    words = data[: len(data) // 4 * 4].view(torch.int32)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for piece in words.split(PIECE):
        wide = piece.long()
        places = torch.arange(1, len(wide) + 1, device=tensor.device)
        total = total * 0x9E3779B1 + torch.stack([wide.sum(), (wide * places).sum()])
    rest = data[len(words) * 4 :].long().sum()
    return total + rest


def _by_device(sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """All sums in order, in one transfer where one device has them all."""
    if len({s.device for s in sums}) == 1:
        return [torch.stack(sums)]
    return [torch.stack([s.cpu() for s in sums])] if sums else []


def _settings(model: Any) -> str:
    config = {k: v for k, v in model.config.to_dict().items() if k not in IGNORED_FIELDS}
    config["attention"] = getattr(model.config, "_attn_implementation", None)
    return json.dumps(
        {
            "class": type(model).__name__,
            "config": config,
            "dtype": str(model.dtype),
            "training": [name for name, module in model.named_modules() if module.training],
            "adapters": _adapters(model),
        },
        sort_keys=True,
        default=str,
    )


def _adapters(model: Any) -> list[tuple[str, ...]]:
    return [(name, *_adapter(module)) for name, module in model.named_modules()
            if _is_adapter(module)]  # fmt: skip


def _is_adapter(module: torch.nn.Module) -> bool:
    return hasattr(type(module), "active_adapters") and hasattr(module, "merged_adapters")


def _adapter(module: Any) -> tuple[str, ...]:
    """The state of an adapter layer, as PEFT has them: which are active, scaled, merged."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return tuple(str(getattr(module, name, None)) for name in names)


def _may_change_numbers(hook: Any) -> bool:
    source = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return source.split(".")[0] not in HARMLESS_HOOKS


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _raw(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return data
