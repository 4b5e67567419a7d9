"""Which models text can be moved in: found by their config, then by trying it out once."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from ..compat import CACHE_ARGUMENT
from .layer import ScatterLayer
from .prompt import Prompt
from .rotation import Rotation, check_rope_types, find_rotation, frequencies_of
from .rows import layout

ATTENTION = ("sdpa", "eager")  # those that take a mask of their caller's
INSTEAD = "Use DynamicCache or GAACCache with this model"

_checked: weakref.WeakKeyDictionary[Any, Rotation] = weakref.WeakKeyDictionary()
_rotation_of: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # the identity


def inner_model(model: Any) -> Any:
    """The transformers model within an adapter's or a compiler's wrapper."""
    model = getattr(model, "_orig_mod", model)
    if callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"model: expected the transformers model that will use the cache, got "
            f"{type(model).__name__}"
        )
    return model


def check_model(model: Any) -> Rotation:
    """How the model's keys turn with their position.

    Raises:
        ValueError: a model in which text cannot be moved; the message names the reason.
    """
    if model in _checked:
        return _checked[model]
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"ChunkReuseCache: {name} is an encoder-decoder model. {INSTEAD}")
    for argument in ("input_ids", "attention_mask", "position_ids"):
        if argument not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"ChunkReuseCache: {name} takes no {argument}, which says where a token stands. "
                f"{INSTEAD}"
            )
    other = {
        type(la).__name__
        for la in DynamicCache(config=config).layers
        if type(la) is not DynamicLayer
    }
    if other:
        raise ValueError(
            f"ChunkReuseCache: {name} has layers other than full attention "
            f"({', '.join(sorted(other))}), whose state does not consist of keys and values of "
            f"every token. {INSTEAD}"
        )
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "kv_lora_rank", None):
        raise ValueError(
            f"ChunkReuseCache: {name} has latent attention (MLA): what it caches is a compressed "
            f"state and a rotated part beside it, not keys that turn with their position. {INSTEAD}"
        )
    check_attention(model)
    check_rope_types(text_config)
    with _evaluating(model):
        rotation = find_rotation(model)
        _try_out_of_order(model)
    _checked[model] = rotation
    return rotation


def rotation_now(model: Any, identity: str) -> Rotation:
    """:func:`check_model`, once more where ``identity`` and the model's frequencies are no longer
    those that were checked: another dtype rounds them, another config changes them.

    Raises:
        ValueError: text cannot be moved in the model as it is now.
    """
    if _rotation_of.get(model) != identity:
        rotation = check_model(model)
        if any(not torch.equal(f, rotation.inv_freq) for f in frequencies_of(model)):
            del _checked[model]
        _rotation_of[model] = identity
    return check_model(model)


def check_attention(model: Any) -> None:
    """Raises ``ValueError`` for attention that takes no mask of ours."""
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in ATTENTION:
        raise ValueError(
            f"ChunkReuseCache needs attention that takes any mask ({' or '.join(ATTENTION)}), and "
            f"this model uses {attention!r}: call model.set_attn_implementation('sdpa')"
        )


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """No dropout meanwhile; every module's mode comes back as it was."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


@torch.no_grad()
def _try_out_of_order(model: Any) -> None:
    """A text in two parts, the second one computed with the rows of the first already in place,
    must have the logits of a plain forward call."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(12, device=model.device) * 7 + 3)[None] % vocabulary
    plain: Any = DynamicCache(config=model.config)
    expected = model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: plain}).logits[:, -1]
    prompt = Prompt(rows=(ids[0].cpu().numpy(),), pads=(0,), positions=(0,), columns=12, keep=1)
    wanted = np.arange(12) % 3 > 0
    needs_float = model.config._attn_implementation != "sdpa"
    plan = layout(prompt, [wanted], ids, needs_float, plain.layers[0].keys.dtype)
    layers: list[Any] = [ScatterLayer() for _ in plain.layers]
    for layer, source in zip(layers, plain.layers, strict=True):
        keys, values = source.keys.clone(), source.values.clone()
        keys[:, :, wanted], values[:, :, wanted] = 0, 0
        layer.fill(keys, values, plan.columns, 0)
    cache = Cache(layers=layers)
    got = model(**plan.arguments(), use_cache=True, **{CACHE_ARGUMENT: cache}).logits[:, -1]
    error = float((got - expected).float().abs().max())
    scale = float(expected.float().abs().max())
    if not error <= 64 * torch.finfo(got.dtype).eps * max(scale, 1e-3):
        raise ValueError(
            f"ChunkReuseCache: {type(model).__name__} gives other logits (by {error:.2g}) when its "
            f"tokens are computed out of order, so that text cannot be moved in it. {INSTEAD}"
        )
