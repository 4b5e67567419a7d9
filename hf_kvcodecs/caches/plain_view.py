"""Keys or values in name as plain objects: compilers trace through them, so that a whole model with
such a cache becomes one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F


class PlainView:
    """Keys or values ``[batch, kv_heads, tokens, head_dim]`` in name: what
    ``scaled_dot_product_attention`` needs to ask its owner, and nothing else.

    Not a tensor. Subclasses have :meth:`attend`, :meth:`_with` and :meth:`refuse`.
    """

    def __init__(self, shape: tuple[int, ...], part: int) -> None:
        self.shape, self.part = shape, part

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
        """The answer to ``scaled_dot_product_attention``."""
        raise NotImplementedError

    @staticmethod
    def refuse(what: str) -> NoReturn:
        """Raises the error that tells the user what cannot be answered."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _with(self, shape: tuple[int, ...]) -> Any:
        """The same in another shape."""
        raise NotImplementedError

    # The three steps of transformers' `repeat_kv`; the kernel groups queries instead.
    def __getitem__(self, index: Any) -> Any:
        whole = slice(None, None, None)
        if len(self.shape) != 4 or index != (whole, whole, None, whole, whole):
            self.refuse(f"[{index}]")
        batch, heads, tokens, head_dim = self.shape
        return self._with((batch, heads, 1, tokens, head_dim))

    def expand(self, *sizes: int) -> Any:
        if len(self.shape) != 5 or len(sizes) != 5:
            self.refuse("expand")
        return self._with(sizes)

    def reshape(self, *sizes: int) -> Any:
        batch, heads, tokens, head_dim = self.shape[0], self.shape[1], *self.shape[-2:]
        repeats = self.shape[2] if len(self.shape) == 5 else 1
        if sizes != (batch, heads * repeats, tokens, head_dim):
            self.refuse("reshape")
        return self._with(sizes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        if func is not F.scaled_dot_product_attention:
            cls.refuse(getattr(func, "__name__", str(func)))
        return cls.attend(*args, **(kwargs or {}))
