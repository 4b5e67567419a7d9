"""What compilers see in place of a cache with a draft face: attention as one operator a layer that
finds its layer when it runs, so that one graph serves every text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..errors import CacheMisuseError
from .draft import DraftLayer, StaticStep
from .plain_view import PlainView

_under_way: ContextVar[tuple[list[DraftLayer], StaticStep]] = ContextVar("drafting")  # by thread


@contextmanager
def drafting(layers: list[DraftLayer], static: StaticStep) -> Iterator[None]:
    """Traced attention within adds to these layers, at the place that ``static`` tells."""
    token = _under_way.set((layers, static))
    try:
        yield
    finally:
        _under_way.reset(token)


@torch.library.custom_op("hf_kvcodecs::draft_attention", mutates_args=())
def draft_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, scale: float
) -> torch.Tensor:
    """Adds one token ``[1, kv_heads, 1, head_dim]`` to a draft layer of the step under way and
    attends to the layer: ``[1, q_heads, 1, head_dim]``, ``query`` alike."""
    layers, static = _under_way.get()
    layer = layers[layer_idx]
    layer.append_at(keys, values, static.cursor)
    out = layer.attend_static(query, scale, static.tail_bias, static.cursor)
    return out.contiguous()


@draft_attention.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], values.shape[3]))


class TracedDrafts(Cache):
    """A cache for one forward pass over one token, within :func:`drafting`."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[TracedLayer(index) for index in range(layers)])


class TracedLayer(CacheLayerMixin):
    """Holds nothing; hands out views whose attention is :func:`draft_attention`."""

    is_sliding = False
    is_compileable = True

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Views of the layer's keys and values, these among them."""
        new = key_states, value_states
        keys, values = (
            DraftView(self.index, new, tuple(part.shape), number) for number, part in enumerate(new)
        )
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class DraftView(PlainView):
    """Keys or values of a draft layer; as long, in name, as the new token."""

    def __init__(
        self,
        index: int,
        new: tuple[torch.Tensor, torch.Tensor],
        shape: tuple[int, ...],
        part: int,
    ) -> None:
        super().__init__(shape, part)
        self.index, self.new = index, new

    def _with(self, shape: tuple[int, ...]) -> DraftView:
        return DraftView(self.index, self.new, shape, self.part)

    @property
    def dtype(self) -> torch.dtype:
        return self.new[self.part].dtype

    @property
    def device(self) -> torch.device:
        return self.new[self.part].device

    @classmethod
    def attend(
        cls,
        query: torch.Tensor,
        key: Any,
        value: Any,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        # The mask says nothing: padding is not kept, and there is one new token.
        if not (isinstance(key, DraftView) and isinstance(value, DraftView)) or dropout_p:
            cls.refuse("attention other than a draft layer's own, without dropout")
        if key.index != value.index or (key.part, value.part) != (0, 1):
            cls.refuse("attention over several layers")
        scale = float(query.shape[-1]) ** -0.5 if scale is None else scale
        # transformers packs the grouped queries of one token as query tokens.
        flat = query.reshape(1, -1, 1, query.shape[-1])
        out: torch.Tensor = draft_attention(flat, *key.new, key.index, scale)
        return out.reshape(*query.shape[:3], out.shape[-1])

    @staticmethod
    def refuse(what: str) -> NoReturn:
        raise CacheMisuseError(
            f"a compiled draft step was asked for {what}, and can only answer "
            "scaled_dot_product_attention; leave out compile_drafts=True"
        )
