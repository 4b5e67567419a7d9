"""``AttentionView``: what ``update`` returns where attention is to be watched or replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from .view import _METADATA, _adds_group_axis


class AttentionSource(Protocol):
    """The keys and values of one layer behind a pair of views.

    Attributes:
        shapes: ``[batch, kv_heads, tokens, head_dim]`` of keys and values as attention is told.
        like: tensors of the dtypes and the device.
        new_tokens: tokens of the update that made the views: those that attention asks for.
    """

    shapes: tuple[torch.Size, torch.Size]
    like: tuple[torch.Tensor, torch.Tensor]
    new_tokens: int

    def attend(self, query: torch.Tensor, call: SDPACall) -> torch.Tensor | None:
        """Attention of ``query`` ``[batch, q_heads, new_tokens, head_dim]``, the output alike; None
        where it is to be computed as asked, from dense tensors."""
        ...

    def dense(self, part: int) -> torch.Tensor:
        """Keys (0) or values (1) for any other use; may refuse."""
        ...


class SDPACall:
    """The arguments of one ``scaled_dot_product_attention`` beside the tensors."""

    def __init__(
        self,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.attn_mask, self.dropout_p, self.is_causal = attn_mask, dropout_p, is_causal
        self.scale, self.enable_gqa = scale, enable_gqa


class AttentionView(torch.Tensor):
    """Keys or values in name. ``scaled_dot_product_attention`` on a pair is the source's to answer,
    also behind transformers' ``repeat_kv`` and ``pack_gqa``; any other operation gets the source's
    dense tensors."""

    source: AttentionSource
    part: int
    repeats: int
    grouped: bool

    @staticmethod
    def __new__(
        cls, source: AttentionSource, part: int, repeats: int = 1, grouped: bool = False
    ) -> AttentionView:
        batch, heads, tokens, head_dim = source.shapes[part]
        rows = (heads, repeats) if grouped else (heads * repeats,)
        like = source.like[part]
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            (batch, *rows, tokens, head_dim),
            dtype=like.dtype,
            device=like.device,
            requires_grad=False,
        )
        view.source, view.part, view.repeats, view.grouped = source, part, repeats, grouped
        return view

    def dense(self) -> torch.Tensor:
        """The numbers as an ordinary tensor, heads repeated as the view says."""
        dense = self.source.dense(self.part)
        if self.repeats == 1 and not self.grouped:
            return dense
        grouped = dense[:, :, None].expand(-1, -1, self.repeats, -1, -1)
        return grouped if self.grouped else grouped.flatten(1, 2)

    def _repeated(self, func: Callable[..., Any], args: tuple[Any, ...]) -> AttentionView | None:
        """The view that a step of ``repeat_kv`` makes of this one, None for any other call."""
        batch, heads, tokens, head_dim = self.source.shapes[self.part]
        if func is torch.Tensor.__getitem__:
            if not self.grouped and self.repeats == 1 and _adds_group_axis(args[0]):
                return AttentionView(self.source, self.part, 1, True)
        elif func in (torch.Tensor.expand, torch.Tensor.reshape) and self.grouped:
            sizes = tuple(args if all(isinstance(size, int) for size in args) else args[0])
            if func is torch.Tensor.reshape:
                if sizes == (batch, heads * self.repeats, tokens, head_dim):
                    return AttentionView(self.source, self.part, self.repeats, False)
            elif len(sizes) == 5 and self.repeats == 1:
                if sizes == (batch, heads, sizes[2], tokens, head_dim):
                    return AttentionView(self.source, self.part, sizes[2], True)
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"AttentionView({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.dense().clone()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if args and isinstance(args[0], AttentionView) and not kwargs:
            out = args[0]._repeated(func, args[1:])
            if out is not None:
                return out
        args, kwargs = tree_map_only(AttentionView, AttentionView.dense, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out func
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(AttentionView, AttentionView.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _attend(query: torch.Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The source's answer, its heads and queries laid out as the caller had them."""
    pair = isinstance(key, AttentionView) and isinstance(value, AttentionView)
    if not pair or key.source is not value.source or key.grouped or value.grouped:
        key, value = tree_map_only(AttentionView, AttentionView.dense, (key, value))
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    source: AttentionSource = key.source
    batch, heads, tokens, head_dim = query.shape
    # A single query token's group may come packed as query tokens (`pack_gqa`).
    plain = query.reshape(batch, -1, source.new_tokens, head_dim)
    out = source.attend(plain, SDPACall(*args, **kwargs))
    if out is None:
        return F.scaled_dot_product_attention(query, key.dense(), value.dense(), *args, **kwargs)
    return out.reshape(batch, heads, tokens, out.shape[-1])


class WatchedStates:
    """Exact states whose attention is computed as asked, or by another way to the same result, and
    whose queries may be shown to someone.

    Args:
        keys, values: ``[batch, kv_heads, tokens, head_dim]``.
        new_tokens: how many of the newest tokens ask.
        watch: called with the queries ``[batch, q_heads, new_tokens, head_dim]`` and the scale,
            before attention runs; None: nobody.
        answer: asked first with the query, the keys, the values and the call; what it leaves (None)
            is computed as asked.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        new_tokens: int,
        watch: Callable[[torch.Tensor, float | None], None] | None,
        answer: Callable[..., torch.Tensor | None] | None = None,
    ) -> None:
        self.like = keys, values
        self.shapes = keys.shape, values.shape
        self.new_tokens = new_tokens
        self._watch, self._answer = watch, answer

    def dense(self, part: int) -> torch.Tensor:
        return self.like[part]

    def attend(self, query: torch.Tensor, call: SDPACall) -> torch.Tensor | None:
        if self._watch is not None:
            self._watch(query, call.scale)
        return None if self._answer is None else self._answer(query, *self.like, call)


def views(source: AttentionSource) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of ``source`` as a pair of views."""
    return AttentionView(source, 0), AttentionView(source, 1)
