"""How a model's keys depend on their position, found by trying it out, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ...kernels.rotate import angles_between, rotate
from ...store.chunk import KV
from ..compat import CACHE_ARGUMENT

ROTATIONS = ("default", "linear", "yarn", "llama3", "proportional")
WHY_NOT = {
    "dynamic": "its frequencies change with the length of the text",
    "longrope": "its frequencies switch when the text grows beyond the original context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How keys of each layer turn with their position.

    Args:
        inv_freq: float32 ``[pairs]``, on the CPU.
        interleaved: which channels make a pair, see :func:`hf_kvcodecs.kernels.rotate.rotate`.
        start: the first rotated channel.
        layers: for each layer whether its keys turn at all.
        like: keys and values ``[layers, kv_heads, 0, head_dim]``: of no token, for their shape.
    """

    inv_freq: torch.Tensor
    interleaved: bool
    start: int
    layers: tuple[bool, ...]
    like: KV

    def angles(
        self, old: torch.Tensor, new: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[tokens, pairs]`` on ``device`` that turn keys of positions ``old`` into
        those of ``new`` (both int64 ``[tokens]``, on the CPU)."""
        # Not every accelerator has float64.
        where = device if device.type == "cuda" else torch.device("cpu")
        cos, sin = angles_between(old.to(where), new.to(where), self.inv_freq.to(where))
        return cos.to(device), sin.to(device)

    def turn(
        self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Writes ``keys`` ``[..., tokens, head_dim]`` of a layer that turns, turned, to ``out`` of
        the same shape: one rounding to their dtype, from float32."""
        rotate(keys, cos, sin, interleaved=self.interleaved, start=self.start, out=out)

    def move(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """``keys`` ``[layers, ..., tokens, head_dim]`` of positions ``old`` as if of positions
        ``new``, a new tensor."""
        out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        self.turn(keys, *self.angles(old, new, keys.device), out)
        for layer, turns in enumerate(self.layers):
            if not turns:
                out[layer] = keys[layer]
        return out


def check_rope_types(config: Any) -> None:
    """Raises ``ValueError`` for rope types that are no rotation by position alone."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {p.get("rope_type", "default") for p in _nested(parameters)}
    for kind in sorted(kinds - set(ROTATIONS)):
        reason = WHY_NOT.get(kind, "it is not known to be a rotation by the position alone")
        raise ValueError(
            f"ChunkReuseCache cannot move keys of rope type {kind!r}: {reason}. Supported are "
            f"{', '.join(ROTATIONS)}. Use DynamicCache or GAACCache with this model"
        )


def find_rotation(model: Any) -> Rotation:
    """The rotation that explains this model's keys at other positions.

    One token alone attends to itself only, so that nothing but the rotation of its keys may depend
    on its position. That is tried at some positions, and compared for each layer.

    Raises:
        ValueError: no rotation does (learned positions, ALiBi, a kind of rope we do not know).
    """
    frequencies = frequencies_of(model)
    if not frequencies or any(not torch.equal(f, frequencies[0]) for f in frequencies):
        found = "several rotary embeddings" if frequencies else "no rotary embedding"
        raise ValueError(
            f"ChunkReuseCache: {type(model).__name__} has {found}; keys can only be moved where "
            "one rotation by the position is all that depends on it"
        )
    positions = [0, 3, min(977, int(getattr(model.config, "max_position_embeddings", 1024)) - 1)]
    seen = [_single_token_states(model, position) for position in positions]
    for _, values in seen[1:]:
        if not _close(values, seen[0][1]):
            raise ValueError(
                f"ChunkReuseCache: in {type(model).__name__} more than the keys depends on the "
                "position (learned positions?), so that what was computed elsewhere is of no use"
            )
    like = seen[0][0][:, 0, :, :0], seen[0][1][:, 0, :, :0]
    return _explain(model, frequencies[0], positions, [keys for keys, _ in seen], like)


def frequencies_of(model: Any) -> list[torch.Tensor]:
    """The frequencies of each rotary embedding as they are now, float32 on the CPU."""
    return [
        module.inv_freq.detach().to("cpu", torch.float32, copy=True)
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
        and module.inv_freq.dim() == 1
    ]


def _explain(
    model: Any,
    inv_freq: torch.Tensor,
    positions: list[int],
    keys: list[torch.Tensor],
    like: KV,
) -> Rotation:
    pairs, head_dim = len(inv_freq), keys[0].shape[-1]
    # A layer without rope has the very same keys everywhere; one with it may hide what little its
    # keys turn behind a channel of large numbers.
    still = [all(torch.equal(k[i], keys[0][i]) for k in keys[1:]) for i in range(len(keys[0]))]
    layers = tuple(not s for s in still)
    if any(layers) and 2 * pairs <= head_dim:
        candidates = [
            Rotation(
                inv_freq=inv_freq, interleaved=interleaved, start=start, layers=layers, like=like
            )
            for interleaved in (False, True)
            for start in sorted({0, head_dim - 2 * pairs})
        ]
        moved = [[r.move(keys[0], torch.tensor([0]), torch.tensor([p])) for p in positions]
                 for r in candidates]  # fmt: skip
        errors = [sum(map(_distance, found, keys)) for found in moved]
        best = errors.index(min(errors))
        if all(
            _close(found[layer], k[layer])
            for found, k in zip(moved[best], keys, strict=True)
            for layer in range(len(k))
        ):
            return candidates[best]
    raise ValueError(
        f"ChunkReuseCache: keys of {type(model).__name__} at another position are not what any "
        "rotation that we know makes of them; text of other positions cannot be reused"
    )


@torch.no_grad()
def _single_token_states(model: Any, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[layers, 1, kv_heads, 1, head_dim]`` of one token at ``position``."""
    cache: Any = DynamicCache(config=model.config)
    where = {"device": model.device}
    model(
        input_ids=torch.tensor([[5 % model.config.get_text_config().vocab_size]], **where),
        position_ids=torch.tensor([[position]], **where),
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
    )
    devices = {str(layer.keys.device) for layer in cache.layers}
    if len(devices) > 1:
        raise ValueError(
            f"ChunkReuseCache: the layers of {type(model).__name__} lie on several devices "
            f"({', '.join(sorted(devices))}); it works on one"
        )
    keys = [layer.keys.cpu() for layer in cache.layers]
    values = [layer.values.cpu() for layer in cache.layers]
    shapes = {(k.shape, v.shape, k.dtype, v.dtype) for k, v in zip(keys, values, strict=True)}
    if len(shapes) != 1:
        raise ValueError(
            f"ChunkReuseCache: the layers of {type(model).__name__} have keys and values of "
            "different shapes or dtypes, which is not supported"
        )
    return torch.stack(keys), torch.stack(values)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.float() - right.float()).norm())


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal up to a few roundings of their dtype, measured against the largest number."""
    tolerance = 8 * torch.finfo(left.dtype).eps * float(right.float().abs().max())
    return bool((left.float() - right.float()).abs().max() <= max(tolerance, 1e-5))


def _nested(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One dict per layer type, or the one for all."""
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return nested or [parameters]
