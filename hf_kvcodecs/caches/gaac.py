"""``GAACCache``: a drop-in transformers cache that keeps its history packed, bit for bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from ..kernels.packed_append import MAX_NEW_TOKENS
from .compat import attention_arguments, calling_attention, notice_once
from .files import load_cache, save_cache
from .guards import NeedsConfigForOtherLayers, PromptLength, check_first_forward, check_layer_order
from .layer import GAACLayer, GAACOptions, check_states
from .offloaded import Staging
from .pool import BlockPool, Seat
from .pooled import PooledLayer
from .report import MemoryReport, measure
from .static_layer import StaticGAACLayer, check_static
from .static_pair import StaticPair
from .view import dense_of

# Attention that calls torch functions on keys and values, so that a KVView may stand in for them.
# Compiled attention (flex_attention), flash attention and hub kernels get dense tensors. None:
# nobody to ask, a view is right anyway.
LAZY_ATTENTION = (None, "sdpa", "eager")

UNCHECKED_TOKENS = 128  # with max_tokens: how many are added between two looks at the device


class GAACCache(NeedsConfigForOtherLayers, DynamicCache):
    """A KV cache about 1.4 times smaller than ``DynamicCache`` that holds the very same numbers.

    ``model.generate(**inputs, past_key_values=GAACCache())`` (``cache=`` from transformers 5.24
    on). The newest tokens stay dense; each full block of ``block_tokens`` is packed once, without
    loss. On a CPU it is decoded one layer at a time while attention reads it; on an NVIDIA GPU sdpa
    reads bf16 blocks as they are, where a kernel takes them (the README says where). Works under
    sdpa, eager, flex_attention and flash attention, for bf16, fp16 and fp32 models; crops, beams,
    batches, left padding and several turns work as with ``DynamicCache``.

    Args:
        config: the model's config. Needed where not every layer is full attention: sliding-window,
            linear-attention and other layers keep transformers' own classes then. Without it every
            layer is packed.
        block_tokens: tokens per sealed block, a multiple of 16.
        kv_dtype: None keeps the model's dtype: exact. "fp8_e4m3" or "fp8_e5m2" casts keys and
            values to fp8 as they arrive (unscaled, saturating), which is *lossy* and your choice;
            packing them is lossless again.
        backend: "auto" | "torch" | "compile": what unpacks. "auto" uses Triton kernels on NVIDIA
            GPUs, the others never do. On a CPU "auto" compiles one fused pass with the C++ compiler
            at hand when there is much to unpack, and uses plain torch otherwise.
        offload: "cpu" keeps packed blocks in (pinned) host memory and copies a layer to the GPU
            while the one before is computed; two layers' blocks and the dense tails take memory
            there. For contexts that do not fit otherwise: a step takes as long as the link needs.
            Not with ``max_tokens``.
        max_tokens: a fixed capacity, for decoding under CUDA graphs: ``generate`` compiles the
            model by itself then, as it does for ``StaticCache``. Needs ``config``, bf16, an NVIDIA
            GPU and sdpa attention; all memory is taken with the prompt. Where states cannot be kept
            so (a CPU, another dtype) the cache grows as without it, and says so.
        pack_from: sequences shorter than this many tokens stay dense.
        pool: a :class:`BlockPool` that holds everything, shared with other caches. With it,
            ``max_tokens`` is what this cache is admitted for, one row now and the others of a batch
            with the prompt; without, it takes blocks as it grows.

    A cache continues one text. For another prompt call :meth:`reset` or make a new one: reuse is
    refused where it can be seen (a prompt no longer than what is held, another batch size), but a
    longer prompt that merely begins differently cannot be told apart from a continuation.

    Raises:
        ValueError: an option out of range.
        PoolFullError: no room in ``pool``.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        block_tokens: int = 128,
        kv_dtype: str | None = None,
        backend: str = "auto",
        offload: str | None = None,
        max_tokens: int | None = None,
        pack_from: int = 0,
        pool: BlockPool | None = None,
    ) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"config: expected the model's config (model.config), got {type(config).__name__}"
            )
        self.options = GAACOptions(
            block_tokens=block_tokens,
            kv_dtype=kv_dtype,
            backend=backend,
            pack_from=pack_from,
            max_tokens=max_tokens,
            offload=offload,
        )
        self._staging = Staging()
        self._seat: Seat | None = None
        if pool is not None:
            config = self._take_seat(pool, config)
            max_tokens = None  # not a capacity of its own
        self.config = config
        self._claimed_by_generate = self._first_forward = False
        self._attention: str | None = None
        self._latest_layer = -1
        super().__init__(config=config)
        if max_tokens is not None:
            layers = StaticCache(check_static(config), max_tokens).layers
            self._unchecked, self._room, self._new_prompt = 0, max_tokens, 2
        else:
            layers = self.layers
            if config is None:
                new_layer = partial(GAACLayer, self.options, self._staging)  # not ours: a cycle
                self.layer_class_to_replicate = new_layer  # type: ignore[assignment]  # a factory
        self.layers = [
            self._new_layer(number) if type(layer) in (DynamicLayer, StaticLayer) else layer
            for number, layer in enumerate(layers)
        ]
        if config is not None and not any(isinstance(layer, GAACLayer) for layer in self.layers):
            notice_once(
                f"GAACCache packs nothing for {type(config).__name__}: none of its layers is plain "
                "full attention. It works, and takes as much memory as DynamicCache."
            )

    def _take_seat(self, pool: BlockPool, config: PreTrainedConfig | None) -> PreTrainedConfig:
        """Admission to ``pool``; the config to go by."""
        max_tokens = self.options.max_tokens
        if config not in (None, pool.config):
            raise ValueError("config: expected the pool's, or none beside pool=; got another one")
        self.options = replace(self.options, max_tokens=None)
        if self.options != GAACOptions():
            raise ValueError(
                f"pool: expected no options beside it but max_tokens, got {self.options}. A pool "
                "holds bf16 blocks of 128 tokens on its device"
            )
        self._seat = Seat(pool, max_tokens)
        return pool.config

    def _new_layer(self, number: int) -> GAACLayer:
        """An empty full-attention layer."""
        if self._seat is not None:
            return PooledLayer(self._seat, number)
        if self.options.max_tokens is None:
            return GAACLayer(self.options, self._staging)
        return StaticGAACLayer(self.options, getattr(self.config, "dtype", None))

    @classmethod
    def from_cache(
        cls, cache: Cache, config: PreTrainedConfig | None = None, **options: Any
    ) -> GAACCache:
        """A new cache with the contents of ``cache`` (a ``DynamicCache``), which is left as it is.

        Full-attention layers are packed, all others copied. ``options`` are those of
        :class:`GAACCache`.
        """
        if not isinstance(cache, DynamicCache):
            raise TypeError(f"cache: expected a DynamicCache, got {type(cache).__name__}")
        packed = cls(config, **options)
        packed.layers = [packed._packed_layer(*layer) for layer in enumerate(cache.layers)]
        return packed

    def _packed_layer(self, number: int, layer: Any) -> Any:
        """A full-attention layer packed, any other copied."""
        if type(layer) is not DynamicLayer and not isinstance(layer, GAACLayer):
            return copy.deepcopy(layer)
        packed = self._new_layer(number)
        if layer.keys is not None and layer.values is not None and layer.get_seq_length():
            packed.update(layer.keys.detach(), layer.values.detach())
        return packed

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens to a layer and returns its keys and values, see :meth:`GAACLayer.update`.

        Raises:
            CacheMisuseError: states that cannot follow what is held, or another prompt where that
                can be seen.
        """
        if self.options.max_tokens is None:
            grown: tuple[Any, Any] = self._update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
            return grown
        if not torch.compiler.is_compiling():
            self._begin_forward(args, kwargs)
            if key_states.shape[2] > MAX_NEW_TOKENS:
                self._new_prompt = 2  # look before the first step and behind it
        layer: Any = self.layers[layer_idx]
        out: tuple[Any, Any] = layer.update(key_states, value_states, *args, **kwargs)
        return out

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._first_forward:
            self._first_forward = False  # a refusal must leave nothing behind
            check_first_forward(self.get_seq_length(), attention_arguments(args, kwargs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin_forward(args, kwargs)
        if layer_idx >= len(self.layers):
            check_states(key_states, value_states, None)  # before layers are added
        check_layer_order(self.layers, layer_idx, key_states.shape[-2])
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.options.offload and key_states.shape[2] <= MAX_NEW_TOKENS:
            for idx in (layer_idx, (layer_idx + 1) % len(self.layers)):
                layer = self.layers[idx]
                if isinstance(layer, GAACLayer):
                    layer.prefetch_blocks()
        if layer_idx <= self._latest_layer or self._attention is None:  # a new forward pass
            self._attention = calling_attention()
        self._latest_layer = layer_idx
        if self._attention not in LAZY_ATTENTION:
            return dense_of(keys), dense_of(values)
        return keys, values

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.options.max_tokens is not None and not torch.compiler.is_compiling():
            self._check_static(query_length)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def _check_static(self, new_tokens: int) -> None:
        """Looks at what only the device knows, as rarely as can be: `generate` comes by before each
        step, and that must not wait for the one before."""
        assert self.options.max_tokens is not None
        self._unchecked += new_tokens
        self._new_prompt -= 1
        soon = self._new_prompt < 0 and self._unchecked < UNCHECKED_TOKENS
        if soon and self._unchecked <= self._room:
            return
        held = [layer._pair for layer in self.layers if isinstance(layer, StaticGAACLayer)]
        pairs = [pair for pair in held if isinstance(pair, StaticPair)]
        for pair in pairs:
            pair.check(new_tokens)
        self._unchecked = new_tokens
        self._room = self.options.max_tokens - (pairs[0].tokens if pairs else 0)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, StaticGAACLayer):
            return layer.length_on_device()  # for the mask: nothing has to wait
        return super().get_query_offset(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = super().get_seq_length(layer_idx)
        if self.options.max_tokens is not None and torch.compiler.is_compiling():
            return length
        return PromptLength(length, self) if self._first_forward and length else length

    @property
    def _is_user_defined(self) -> bool:
        return self._claimed_by_generate

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this at the start of each call: the one sign of a new prompt.
        self._claimed_by_generate = self._first_forward = value

    def reset(self) -> None:
        """Forgets everything, so that the object can serve another prompt."""
        super().reset()
        self._first_forward = False

    def dense(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values ``[batch, kv_heads, tokens, head_dim]`` of one layer, as copies of
        your own."""
        layer = self.layers[layer_idx]
        if isinstance(layer, GAACLayer) and layer.is_initialized:
            packed = layer.pair.snapshot().dense()
            return packed[0].clone(), packed[1].clone()
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise ValueError(f"layer {layer_idx} ({layer!r}) holds no keys and values")
        return keys.clone(), values.clone()

    def memory(self) -> MemoryReport:
        """The bytes held at this moment, counted from the tensors themselves."""
        return measure(self.layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a safetensors file (the format is in
        :mod:`hf_kvcodecs.caches.files`).

        The file names the model if the cache was made with ``config=``. An older file at ``path``
        is replaced only once the new one is complete.

        Raises:
            ValueError: a layer whose state cannot be saved (linear attention).
        """
        save_cache(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        config: PreTrainedConfig | None = None,
    ) -> GAACCache:
        """The cache that :meth:`save` wrote, on ``device`` (the CPU if None).

        Args:
            path: the file.
            device: where every layer goes.
            config: the config of the model that will use it. The file of another model is refused
                then; without it, a model of other shapes is refused at its first forward. Needed
                for sliding-window models.

        Raises:
            CorruptDataError: not such a file, or a truncated or damaged one.
            UnsupportedLayoutError: a file of a newer release.
            CacheMisuseError: the file of another model.
        """
        return load_cache(cls, path, torch.device(device or "cpu"), config)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        for layer in self.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            yield dense_of(keys), dense_of(values), getattr(layer, "_sliding_window_tensor", None)

    def __repr__(self) -> str:
        lines, first = [], 0
        names = [repr(layer) for layer in self.layers]
        for idx in range(1, len(names) + 1):
            if idx == len(names) or names[idx] != names[first]:
                span = f"{first}" if idx - first == 1 else f"{first}-{idx - 1}"
                lines.append(f"  {span}: {names[first]}")
                first = idx
        return (
            f"{type(self).__name__}({self.options}, layers:\n"
            + "\n".join(lines or ["  none yet"])
            + "\n)"
        )
