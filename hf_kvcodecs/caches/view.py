"""``KVView``: a tensor in name whose numbers stay packed; what ``update`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .fused import FusedSnapshot
from .lazy_attention import fused_attention
from .pair import KVPair

# What a tensor can be asked without its numbers. Anything else makes the dense tensor first.
_ATTRIBUTES = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn itemsize nbytes "
    "is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_quantized is_nested"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous "
    "is_floating_point is_complex get_device __len__"
)
_METADATA = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()} | {
    getattr(torch.Tensor, name) for name in _METHODS.split()
}


class KVView(torch.Tensor):
    """Keys or values ``[batch, kv_heads, tokens, head_dim]`` whose sealed blocks are still packed.

    Shape, dtype, device and strides (contiguous) are known without decoding. Any operation on it
    computes with the exact dense tensor, made at the first use and kept until the view dies: one
    layer at a time within a model. Only ``scaled_dot_product_attention`` may be answered without:
    by the kernel that reads packed blocks, see :mod:`hf_kvcodecs.caches.lazy_attention`.
    """

    source: KVPair | FusedSnapshot
    part: int
    repeats: int
    grouped: bool

    @staticmethod
    def __new__(
        cls, source: KVPair | FusedSnapshot, part: int, repeats: int = 1, grouped: bool = False
    ) -> KVView:
        """``repeats``: each head that many times, as transformers' ``repeat_kv`` does for grouped
        queries; ``grouped``: ``[batch, kv_heads, repeats, tokens, head_dim]``, its steps on the
        way."""
        batch, heads, tokens, head_dim = source.shape(part)
        rows = (heads, repeats) if grouped else (heads * repeats,)
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            (batch, *rows, tokens, head_dim),
            dtype=source.dtype(part),
            device=source.device,
            requires_grad=False,
        )
        view.source, view.part, view.repeats, view.grouped = source, part, repeats, grouped
        return view

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dense(self) -> torch.Tensor:
        """The exact numbers as an ordinary tensor."""
        dense = self.source.dense()[self.part]
        if self.repeats == 1 and not self.grouped:
            return dense
        grouped = dense[:, :, None].expand(-1, -1, self.repeats, -1, -1)
        return grouped if self.grouped else grouped.flatten(1, 2)

    def _repeated(self, func: Callable[..., Any], args: tuple[Any, ...]) -> KVView | None:
        """The view that a step of ``repeat_kv`` makes of this one, None for any other call."""
        if not isinstance(self.source, FusedSnapshot):
            return None
        batch, heads, tokens, head_dim = self.source.shape(self.part)
        if func is torch.Tensor.__getitem__:
            (index,) = args
            if not self.grouped and self.repeats == 1 and _adds_group_axis(index):
                return KVView(self.source, self.part, 1, True)
        elif func in (torch.Tensor.expand, torch.Tensor.reshape) and self.grouped:
            sizes = args if all(isinstance(size, int) for size in args) else args[0]
            if func is torch.Tensor.reshape:
                if tuple(sizes) == (batch, heads * self.repeats, tokens, head_dim):
                    return KVView(self.source, self.part, self.repeats, False)
            elif len(sizes) == 5 and self.repeats == 1:
                if tuple(sizes) == (batch, heads, sizes[2], tokens, head_dim):
                    return KVView(self.source, self.part, sizes[2], True)
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return (
                f"KVView({tuple(self.shape)}, {self.dtype}, {self.device}, "
                f"{self.source.sealed_tokens} of {self.shape[-2]} tokens packed)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

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
        out = fused_attention(func, args, kwargs)
        first = args[0] if args else None
        if out is None and isinstance(first, KVView) and not kwargs:
            if not torch.compiler.is_compiling():
                out = first._repeated(func, args[1:])
        if out is not None:
            return out
        args, kwargs = tree_map_only(KVView, KVView.dense, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out func
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls that reach the dispatcher from C++ see the dense tensor too."""
        args, kwargs = tree_map_only(KVView, KVView.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _adds_group_axis(index: Any) -> bool:
    """Whether ``index`` is ``[:, :, None, :, :]``."""
    if not (isinstance(index, tuple) and len(index) == 5 and index[2] is None):
        return False
    rest = index[:2] + index[3:]
    return all(isinstance(part, slice) and part == slice(None) for part in rest)


def dense_of(tensor: torch.Tensor | None) -> Any:
    """The dense tensor of a view; anything else as it is."""
    return tensor.dense() if isinstance(tensor, KVView) else tensor
