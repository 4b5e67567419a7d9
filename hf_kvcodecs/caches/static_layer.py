"""A layer of fixed capacity whose decoding steps can be compiled and captured."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig

from ..errors import CacheMisuseError
from ..kernels.packed_append import MAX_NEW_TOKENS
from ..kernels.packed_attention import MAX_GROUP
from ..kernels.static_ops import static_append, static_attention
from .compat import notice_once
from .layer import GAACLayer, GAACOptions, check_states
from .plain_view import PlainView
from .static_pair import StaticPair


def check_static(config: PreTrainedConfig | None) -> PreTrainedConfig:
    """``config`` itself; raises ``ValueError`` for a model whose steps could not be captured."""
    if config is None:
        raise ValueError(
            "max_tokens: expected config=model.config beside it, which says how many layers there "
            "are and of which kinds; got none"
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        raise ValueError(
            'max_tokens: expected a model with attn_implementation="sdpa", which the fused kernel '
            f"answers; this one has {attention!r}. Load the model with sdpa, or leave it out"
        )
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    group = heads // (getattr(text, "num_key_value_heads", None) or heads)
    if group > MAX_GROUP:
        raise ValueError(
            f"max_tokens: expected at most {MAX_GROUP} query heads per KV head, which the fused "
            f"kernel takes; this model has {group}. Leave it out"
        )
    return config


class StaticGAACLayer(GAACLayer):
    """:class:`GAACLayer` for at most ``options.max_tokens`` tokens.

    A prompt is attended to dense, as it comes, and packed behind that. Up to 64 tokens more go
    through two operators that compilers trace and CUDA graphs capture.
    """

    def __init__(self, options: GAACOptions, dtype: torch.dtype | None = None) -> None:
        """``dtype``: that of the model, as far as it is known."""
        assert options.max_tokens is not None
        super().__init__(options)
        self.max_tokens = options.max_tokens
        self.model_dtype = dtype

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # an attribute there
        if self._pair is None:  # asked before there are any states
            return self.model_dtype in (None, torch.bfloat16)
        return isinstance(self._pair, StaticPair)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Adds tokens. Returns dense keys and values for a prompt, and for up to 64 tokens behind
        one :class:`StaticView` that only ``scaled_dot_product_attention`` takes.

        Raises:
            CacheMisuseError: states that cannot follow what is held, or beyond ``max_tokens``.
        """
        pair = self._pair
        if not isinstance(pair, StaticPair) or key_states.shape[2] > MAX_NEW_TOKENS:
            filled: tuple[Any, Any] = self._fill(key_states, value_states)
            return filled
        held = pair.memory
        after = static_append(key_states, value_states, held.memory, held.sizes, self.max_tokens)
        batch, heads, new_tokens, head_dim = key_states.shape
        shape = (batch, heads, self.max_tokens, head_dim)
        return (
            StaticView(pair, after, new_tokens, shape, 0),
            StaticView(pair, after, new_tokens, shape, 1),
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _fill(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._pair
        check_states(keys, values, held)
        if isinstance(held, StaticPair):
            return held.append(keys, values).dense()
        if keys.shape[2] > self.max_tokens:
            raise CacheMisuseError(
                f"{keys.shape[2]} tokens do not fit into a cache of max_tokens={self.max_tokens}. "
                "Make it with a larger max_tokens, or without one (it grows then)"
            )
        if held is None and self.options.fuses(keys, values):
            self._pair = StaticPair(keys, values, self.max_tokens)
            return keys, values
        notice_once(
            f"GAACCache(max_tokens={self.max_tokens}) grows as needed here, and its steps are not "
            f"captured: {keys.dtype} states of head_dim {keys.shape[3]} on {keys.device} have no "
            "fused kernel."
        )
        return super().update(keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if isinstance(self._pair, StaticPair) and query_length <= MAX_NEW_TOKENS:
            return self.max_tokens, 0
        return super().get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        if isinstance(self._pair, StaticPair) and torch.compiler.is_compiling():
            return self.length_on_device()  # type: ignore[return-value]  # as StaticLayer does
        return super().get_seq_length()

    def length_on_device(self) -> torch.Tensor | int:
        """The tokens held, an int32 scalar on the device if that alone knows."""
        pair = self._pair
        return pair.memory.state[0, 0] if isinstance(pair, StaticPair) else super().get_seq_length()

    def get_max_length(self) -> int:
        return self.max_tokens


class StaticView(PlainView):
    """Keys or values ``[batch, kv_heads, max_tokens, head_dim]`` in name, which the fused kernel
    answers for."""

    def __init__(
        self, pair: Any, after: torch.Tensor, new_tokens: int, shape: tuple[int, ...], part: int
    ) -> None:
        super().__init__(shape, part)
        self.pair, self.after, self.new_tokens = pair, after, new_tokens

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.after.device

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
        if not (isinstance(key, StaticView) and isinstance(value, StaticView)):
            cls.refuse("attention with keys or values of another source")
        if key.pair is not value.pair or (key.part, value.part) != (0, 1) or dropout_p:
            cls.refuse("attention other than this layer's own, without dropout")
        new_tokens = key.new_tokens
        if attn_mask is None:
            if is_causal or new_tokens > 1:
                cls.refuse("attention of several tokens without a mask")
            span = None
        else:
            span = visible_span(attn_mask, new_tokens)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        held = key.pair.memory
        batch, heads, q_tokens, head_dim = query.shape
        if q_tokens == new_tokens:
            attended: torch.Tensor = static_attention(
                query, key.after, span, held.memory, held.sizes, scale
            )
            return attended
        # transformers packs a token's grouped queries so: [batch, kv_heads, repeats, head_dim].
        if new_tokens != 1:
            cls.refuse(f"{q_tokens} queries behind {new_tokens} new tokens")
        folded = query.reshape(batch, heads * q_tokens, 1, head_dim)
        out: torch.Tensor = static_attention(
            folded, key.after, span, held.memory, held.sizes, scale
        )
        return out.reshape(batch, heads, q_tokens, head_dim)

    def _with(self, shape: tuple[int, ...]) -> StaticView:
        return StaticView(self.pair, self.after, self.new_tokens, shape, self.part)

    @staticmethod
    def refuse(what: str) -> NoReturn:
        raise _misuse(what)


_latest: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None


def visible_span(mask: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """int32 ``[2, batch]``: the first token that each row sees, and the number behind its last one.

    The first is -1, which makes attention NaN, where ``mask`` ``[batch or 1, 1, new_tokens,
    max_tokens]`` hides anything else than the tokens before it and those after each query's own.
    Does not wait for the device. It depends on nothing but the mask, so that compilers compute it
    once for all layers; without one it is kept for them, which hand on the same mask.
    """
    global _latest
    if torch.compiler.is_compiling():
        return _visible_span(mask, new_tokens)
    latest = _latest  # once: other threads set it too
    version = -1 if mask.is_inference() else mask._version
    if latest is not None and latest[0]() is mask and latest[1] == version >= 0:
        return latest[2]
    span = _visible_span(mask, new_tokens)
    _latest = weakref.ref(mask), version, span
    return span


def _visible_span(mask: torch.Tensor, new_tokens: int) -> torch.Tensor:
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != new_tokens:
        raise _misuse(f"a mask of shape {tuple(mask.shape)}")
    rows = mask[:, 0]  # [batch, queries, tokens]
    visible = rows if rows.dtype == torch.bool else rows == 0
    token = torch.arange(rows.shape[2], device=rows.device, dtype=torch.int32)
    first = torch.where(visible, token, rows.shape[2]).amin(-1)  # [batch, queries]
    behind = torch.where(visible, token + 1, 0).amax(-1)
    count = visible.sum(-1, dtype=torch.int32)
    start, end = first[:, -1:], behind[:, -1:]
    own = end - torch.arange(new_tokens - 1, -1, -1, device=rows.device, dtype=torch.int32)
    # Tokens from `start` to a query's own, none left out; padding sees nothing.
    fits = (first == start) & (behind == own) & (count == own - start)
    fits = torch.where(own > start, fits, count == 0).all(-1)
    if rows.dtype != torch.bool:
        fits = fits & (visible | (rows <= torch.finfo(rows.dtype).min)).all(-1).all(-1)
    return torch.stack([torch.where(fits, start[:, 0], -1), end[:, 0]]).to(torch.int32)


def _misuse(what: str) -> CacheMisuseError:
    return CacheMisuseError(
        f"GAACCache(max_tokens=...) was asked for {what}, and can only answer causal "
        "scaled_dot_product_attention with left padding. Load the model with "
        'attn_implementation="sdpa", or make the cache without max_tokens'
    )
