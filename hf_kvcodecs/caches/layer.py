"""One layer of a :class:`GAACCache`: transformers' layer contract over packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..codecs import RawCodec, TensorCodec, codec_for
from ..errors import CacheMisuseError
from ..kernels.register_blocks import BLOCK_TOKENS
from .compat import notice_once
from .fused import FusedPair, can_fuse
from .offloaded import OffloadedPair, Staging
from .pair import KVPair
from .sequence import PackedSequence
from .static_pair import StaticPair
from .view import KVView

Pair = KVPair | FusedPair | StaticPair

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True, kw_only=True)
class GAACOptions:
    """The options of :class:`GAACCache`, checked; see there for their meaning."""

    block_tokens: int = 128
    kv_dtype: str | None = None
    backend: str = "auto"
    pack_from: int = 0
    max_tokens: int | None = None
    offload: str | None = None

    def __post_init__(self) -> None:
        codec_for(
            torch.bfloat16, block_tokens=self.block_tokens, backend=self.backend
        )  # raises on bad values
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_dtype: expected None or one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}"
            )
        if type(self.pack_from) is not int or self.pack_from < 0:
            raise ValueError(
                f"pack_from: expected a number of tokens of at least 0, got {self.pack_from!r}"
            )
        if self.offload not in (None, "cpu"):
            raise ValueError(f'offload: expected None or "cpu", got {self.offload!r}')
        if self.max_tokens is None:
            return
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(
                f"max_tokens: expected None or a number of tokens, got {self.max_tokens!r}"
            )
        if self.offload is not None:
            raise ValueError(
                f"max_tokens: offload={self.offload!r} beside it; captured graphs read blocks at "
                "fixed places on the GPU, and offloaded ones have none. For contexts that do not "
                "fit leave out max_tokens, for speed leave out offload"
            )
        if replace(self, max_tokens=None) != GAACOptions():
            raise ValueError(
                "max_tokens: expected the other options as they are by default, which is what the "
                f"fused kernels read; got {self}. Leave out either"
            )

    def fuses(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether states like these are kept for fused attention."""
        return (
            self.backend == "auto"
            and self.kv_dtype is None
            and self.block_tokens == BLOCK_TOKENS
            and can_fuse(keys, values)
        )

    def codec(self, dtype: torch.dtype) -> TensorCodec:
        """The codec for states of ``dtype``."""
        stored = KV_DTYPES[self.kv_dtype] if self.kv_dtype else dtype
        codec = codec_for(stored, block_tokens=self.block_tokens, backend=self.backend)
        if isinstance(codec, RawCodec):
            notice_once(
                f"GAACCache keeps {dtype} states exactly but unpacked: only bf16, fp16 and fp32 "
                "can be packed."
            )
        return codec


class GAACLayer(CacheLayerMixin):
    """Keys and values of one layer: sealed blocks packed without loss, the newest tokens dense."""

    is_sliding = False
    is_croppable = True
    is_compileable = False  # True would make `generate` compile a cache whose shapes change

    def __init__(self, options: GAACOptions | None = None, staging: Staging | None = None) -> None:
        """``staging``: the cache's, shared by its layers, with ``offload``."""
        # Not the base class's __init__, which assigns keys and values: here they are properties.
        self.options = options or GAACOptions()
        self._staging = staging or Staging()
        self._pair: Pair | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # an attribute there
        return self._pair is not None

    @property
    def pair(self) -> Pair:
        """What the layer holds; raises ``ValueError`` before the first update."""
        if self._pair is None:
            raise ValueError("this layer holds no keys and values yet")
        return self._pair

    @pair.setter
    def pair(self, pair: Pair) -> None:
        self._pair = pair

    @property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """The layer as packed sequences, as files have them: none before the first update, one for
        keys and values together, or two."""
        return self._portable().sequences if self._pair else ()

    def _portable(self) -> KVPair:
        """What is held, in the layout that every device reads."""
        if isinstance(self.pair, KVPair):
            return self.pair
        keys, values = self.pair.dense()
        return KVPair.begin(keys, values, self.options.codec).append(keys, values).seal()

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # an attribute there
        """Every key ``[batch, kv_heads, tokens, head_dim]``, decoded when used; None before the
        first update."""
        return tensors_of(self._pair)[0] if self._pair else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]  # an attribute there
        """Every value, like :attr:`keys`."""
        return tensors_of(self._pair)[1] if self._pair else None

    @property
    def device(self) -> torch.device:
        return self._pair.device if self._pair else torch.device("cpu")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """An empty layer for states like these; chooses the codec for their dtypes."""
        self._pair = KVPair.begin(key_states, value_states, self.options.codec)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens and returns all keys and values: KVViews once a block is sealed, ordinary
        tensors before.

        Raises:
            CacheMisuseError: states that cannot follow what is held (batch, heads, width, dtype,
                device) or that require grad. The layer is unchanged then.
        """
        check_states(key_states, value_states, self._pair)
        if self.options.fuses(key_states, value_states):
            return self._update_fused(key_states, value_states)
        if self.options.offload and key_states.device.type != "cpu":
            notice_once(
                f"GAACCache(offload={self.options.offload!r}) stays on {key_states.device}: only "
                "bf16 states that the fused kernels read can be offloaded."
            )
        held = self._pair or KVPair.begin(key_states, value_states, self.options.codec)
        assert isinstance(held, KVPair)  # check_states saw to the dtype and the device
        pair = held.append(key_states, value_states)
        self._pair = pair.seal() if pair.tokens >= self.options.pack_from else pair
        return tensors_of(pair)

    def _update_fused(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._pair
        if not isinstance(held, FusedPair):  # nothing yet, or loaded, or back from another device
            old = held
            held = self._empty_fused(keys, values)
            if old is not None and old.tokens:
                held.append(*old.dense(), seal=old.tokens >= self.options.pack_from)
        first = held.tokens == 0
        tokens = held.tokens + keys.shape[2]
        self._pair = held.append(keys, values, seal=tokens >= self.options.pack_from)
        return (keys, values) if first else tensors_of(self._pair)

    def _empty_fused(self, keys: torch.Tensor, values: torch.Tensor) -> FusedPair:
        if self.options.offload:
            return OffloadedPair(keys, values, self._staging)
        return FusedPair(keys, values)

    def prefetch_blocks(self) -> None:
        """Begins to copy offloaded blocks to the device."""
        if isinstance(self._pair, OffloadedPair):
            self._pair.prefetch()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._pair.tokens if self._pair else 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._pair = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the newest ``-tokens_to_remove`` tokens; a sealed block that the cut falls into is
        reopened, exactly."""
        tokens_to_remove = int(tokens_to_remove)  # 5.17 hands a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                "crop: expected 0 or a negative number of tokens to remove, got "
                f"{tokens_to_remove}; absolute lengths are gone from transformers"
            )
        if tokens_to_remove and self._pair:
            tokens = max(self._pair.tokens + tokens_to_remove, 0)
            if isinstance(self._pair, KVPair):
                self._pair = self._pair.crop(tokens)
            else:
                self._pair = self._pair.crop(tokens, seal=tokens >= self.options.pack_from)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps rows ``indices`` (int64 or bool) of the batch, in that order."""
        if self._pair:
            indices = torch.as_tensor(indices)
            if indices.dtype == torch.bool:
                indices = indices.nonzero().squeeze(-1)
            indices = torch.where(indices < 0, indices + self._pair.batch, indices)
            self._pair = self._pair.select_batch(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._pair:
            self.batch_select_indices(
                torch.arange(self._pair.batch, device=self.device).repeat_interleave(repeats)
            )

    def offload(self) -> None:
        self._home = self.device
        self.move(torch.device("cpu"))

    def prefetch(self) -> None:
        self.move(getattr(self, "_home", self.device))

    def move(self, device: torch.device) -> None:
        """Moves everything held to ``device``."""
        if self._pair and self.device != device:
            self._pair = self._portable().map(
                lambda sequence: sequence.map(lambda tensor: tensor.to(device))
            )

    def __repr__(self) -> str:
        if not self._pair:
            return "GAACLayer(empty)"
        sealed = self._pair.sealed_tokens
        how = "for fused attention"
        if isinstance(self._pair, KVPair):
            how = f"by {self._pair.sequences[0].codec.id!r}"
        return f"GAACLayer({sealed} tokens packed {how}, {self._pair.tokens - sealed} dense)"


def tensors_of(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as attention gets them: views once a block is sealed, the dense tail
    before."""
    if isinstance(pair, StaticPair):
        return pair.dense()
    source = pair.snapshot()  # what a reader decodes must not stay in the layer
    return (KVView(source, 0), KVView(source, 1)) if source.sealed_tokens else source.dense()


def check_states(keys: torch.Tensor, values: torch.Tensor, held: Pair | None) -> None:
    """Raises :class:`CacheMisuseError` unless ``keys`` and ``values`` can follow what a layer
    holds."""
    for index, (name, states) in enumerate((("keys", keys), ("values", values))):
        if states.dim() != 4 or states.shape[:3] != keys.shape[:3]:
            raise CacheMisuseError(
                f"{name}: expected [batch, kv_heads, tokens, head_dim], the same but for head_dim "
                "in keys and values; "
                f"got keys {tuple(keys.shape)} and values {tuple(values.shape)}"
            )
        if states.requires_grad and torch.is_grad_enabled():
            raise CacheMisuseError(
                f"{name} require grad, but packed history cannot carry gradients. Run the model "
                "under "
                "torch.no_grad() or torch.inference_mode(), or train without a cache"
            )
        if held is None:
            continue
        batch, heads, tokens, head_dim = held.shape(index)
        if states.shape[0] != batch:
            raise CacheMisuseError(
                f"{name}: batch size {states.shape[0]}, but this cache holds {tokens} tokens of "
                f"{batch} row(s). For "
                "another prompt call reset() or take a new cache; for more sequences per prompt "
                "call "
                "batch_repeat_interleave() on the filled cache first"
            )
        if (states.shape[1], states.shape[3]) != (heads, head_dim):
            raise CacheMisuseError(
                f"{name}: {states.shape[1]} kv_heads of width {states.shape[3]}, but this cache "
                f"holds {heads} of "
                f"width {head_dim}: it was filled by another model. Call reset() or take a new "
                "cache"
            )
        if states.dtype != held.dtype(index) or states.device != held.device:
            raise CacheMisuseError(
                f"{name}: {states.dtype} on {states.device}, but this cache holds "
                f"{held.dtype(index)} on "
                f"{held.device}. One cache keeps one dtype and device per layer: call reset() or "
                "take a new one"
            )
