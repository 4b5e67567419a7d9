"""Misuse that transformers lets pass, or answers with a bare IndexError, as clear errors."""

from __future__ import annotations

from typing import Any

from ..errors import CacheMisuseError
from .layer import GAACLayer

OTHER_PROMPT = (
    "A cache continues one text: pass the whole conversation so far with the new part behind it, "
    "or call "
    "cache.reset() (or take a new cache) for another prompt"
)


class PromptLength(int):
    """The cached length as ``generate`` sees it while it starts.

    ``generate`` feeds the last ``prompt_length - cached_length`` tokens of the prompt, and takes a
    wrong slice without an error when that is not positive. It is this very subtraction that
    refuses.
    """

    cache: Any

    def __new__(cls, length: int, cache: Any) -> PromptLength:
        self = super().__new__(cls, length)
        self.cache = cache
        return self

    def __rsub__(self, prompt_length: int) -> int:
        new_tokens = prompt_length - int(self)
        if new_tokens <= 0:
            self.cache._first_forward = False  # a refusal must leave nothing behind
            raise CacheMisuseError(
                f"The prompt has {prompt_length} tokens, but this cache already holds {int(self)}: "
                "nothing new to "
                f"read. {OTHER_PROMPT}"
            )
        return new_tokens


def check_first_forward(held_tokens: int, attention_arguments: dict[str, Any]) -> None:
    """Raises :class:`CacheMisuseError` where the first forward after ``generate`` began cannot be
    right.

    Args:
        held_tokens: tokens in the cache before that forward.
        attention_arguments: what the model handed its attention layer; empty where transformers
            does not tell.
    """
    if attention_arguments.get("use_cache") is False:
        raise CacheMisuseError(
            "generate(use_cache=False) was given a cache: every step would add the whole text to "
            "it again. Leave out "
            "one of the two"
        )
    positions = attention_arguments.get("position_ids")
    if (
        held_tokens
        and positions is not None
        and positions.dim() == 2
        and int(positions[:, 0].max()) == 0
    ):
        raise CacheMisuseError(
            f"This cache holds {held_tokens} tokens, but the model is fed a text from its "
            "beginning again (assisted "
            f"decoding does so with a filled cache). {OTHER_PROMPT}"
        )


def check_layer_order(layers: list[Any], layer_idx: int, new_tokens: int) -> None:
    """Raises :class:`CacheMisuseError` if the layer below got more tokens than this one's very
    first ones.

    That is how an encoder-decoder model fills a bare cache: self-attention and cross-attention into
    the same layers.
    """
    below = layers[layer_idx - 1] if 0 < layer_idx <= len(layers) else None
    here = layers[layer_idx] if layer_idx < len(layers) else None
    if isinstance(below, GAACLayer) and (
        here is None or (isinstance(here, GAACLayer) and not here.is_initialized)
    ):
        held = below.get_seq_length()
        if below.is_initialized and held != new_tokens:
            raise CacheMisuseError(
                f"Layer {layer_idx} begins with {new_tokens} token(s) where layer {layer_idx - 1} "
                f"holds {held}. If "
                "this is an encoder-decoder model, pass EncoderDecoderCache(GAACCache(), "
                "DynamicCache()) so that self- and cross-attention do not share one cache. If not, "
                "another model (with fewer layers) filled this one. Take a fresh GAACCache."
            )


class NeedsConfigForOtherLayers:
    """Methods that only layers other than full attention use: without a config there are no such
    layers."""

    config: Any

    def _require_config(self, name: str) -> None:
        if self.config is None:
            raise ValueError(
                f"{name}: this model has layers other than plain attention (linear attention, "
                "convolution, an "
                "indexer). Make the cache with GAACCache(config=model.config), so that those "
                "layers keep "
                "transformers' own state"
            )

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self._require_config("get_conv_state")
        return super().get_conv_state(*args, **kwargs)  # type: ignore[misc]

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self._require_config("update_conv_state")
        return super().update_conv_state(*args, **kwargs)  # type: ignore[misc]

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self._require_config("get_recurrent_state")
        return super().get_recurrent_state(*args, **kwargs)  # type: ignore[misc]

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self._require_config("update_recurrent_state")
        return super().update_recurrent_state(*args, **kwargs)  # type: ignore[misc]

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        self._require_config("has_previous_state")
        return super().has_previous_state(*args, **kwargs)  # type: ignore[misc]

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        self._require_config("update_indexer")
        return super().update_indexer(*args, **kwargs)  # type: ignore[misc]
