"""``SpeculativeKVCache``: an exact cache far away, and a small compressed one to draft with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..compressors import Compressor, compressor_for
from ..errors import CacheMisuseError
from ..store.full import DiskStore, FullStore, HostStore
from ..store.packed import PackedStore
from .compat import attention_arguments, calling_attention, notice_once
from .guards import NeedsConfigForOtherLayers, PromptLength, check_first_forward
from .speculative_layer import Faces, SpeculativeLayer
from .speculative_report import DraftVerifyReport

STORES: dict[str, type[FullStore]] = {"cpu": HostStore, "disk": DiskStore}


class SpeculativeKVCache(NeedsConfigForOtherLayers, DynamicCache):
    """A KV cache with two faces: the exact one in host memory (or on disk), and a compressed one on
    the model's device that drafts what the exact one then checks.

    ``model.generate(**inputs, past_key_values=SpeculativeKVCache(), custom_generate=draft_verify)``
    says what plain ``generate`` says, token for token in fp32 (in bf16 a forward over many tokens
    rounds differently from single steps), while the device holds the compressed face and a staging
    area of two layers. Without ``draft_verify`` it is an exact offloaded cache, and says so once.

    Args:
        config: the model's config. Needed where not every layer is full attention: sliding-window
            layers keep transformers' own classes then, and stay on the device.
        compressor: a name (see :func:`hf_kvcodecs.compressors.compressor_for`) or a
            :class:`Compressor`.
        keep, bits: options of a compressor given by name.
        draft_length: tokens drafted before each verification, or "auto".
        full: "cpu" (pinned where there is CUDA), "disk", or a :class:`FullStore`.
        full_codec: None, or "gaac": the exact face is kept packed without loss, so that fewer bytes
            cross the link.
        staging_bytes: size of the area on the device that layers of the exact face pass through.
            None: two layers. The more, the more of the transfer hides behind drafting.
        hold_decoded: keep quantised tokens decoded too: faster drafts, the memory of exact tokens.
        graphs: make draft steps of fixed shape, captured as a CUDA graph on GPUs (where launching
            kernels one by one takes longer than running them). None: on GPUs, where every layer
            has two faces and none is reselected.
        compile_drafts: compile such a step first, as ``generate`` does for static caches: faster
            steps for the time that it takes to compile, once per model.
        refresh_tokens: so many generated tokens are kept exactly before the draft face is
            compressed anew, while a verification has the exact one at hand.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        compressor: str | Compressor = "snapkv",
        keep: float | None = None,
        bits: int | None = None,
        draft_length: int | str = 25,
        full: str | FullStore = "cpu",
        full_codec: str | None = None,
        staging_bytes: int | None = None,
        hold_decoded: bool = False,
        graphs: bool | None = None,
        compile_drafts: bool = False,
        refresh_tokens: int = 256,
    ) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"config: expected the model's config (model.config), got {type(config).__name__}"
            )
        _check_options(draft_length, staging_bytes, refresh_tokens)
        self.config = config
        self.draft_length = draft_length
        self.faces = Faces(
            compressor=_compressor(compressor, keep, bits),
            store=_store(full, full_codec),
            staging_bytes=staging_bytes,
            hold_decoded=hold_decoded,
            refresh_tokens=refresh_tokens,
        )
        if isinstance(draft_length, int):
            self.faces.spare_tokens = max(self.faces.spare_tokens, draft_length + 1)
        self.graphs, self.compile_drafts = graphs, compile_drafts
        self.decoding = False  # set by draft_verify while it runs
        self.last_report: DraftVerifyReport | None = None
        self._claimed_by_generate = self._first_forward = False
        self._kept_aside: dict[int, Any] = {}  # other layers as they were when drafting began
        self._verified: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = self._new_layer  # type: ignore[assignment]
        self.layers = [
            SpeculativeLayer(self.faces, index) if type(layer) is DynamicLayer else layer
            for index, layer in enumerate(self.layers)
        ]

    def _new_layer(self) -> SpeculativeLayer:
        return SpeculativeLayer(self.faces, len(self.layers))

    @property
    def compressor(self) -> Compressor:
        """How the draft face is compressed."""
        return self.faces.compressor

    @property
    def own_layers(self) -> list[SpeculativeLayer]:
        """The layers with two faces, in order."""
        return [layer for layer in self.layers if isinstance(layer, SpeculativeLayer)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens to a layer and returns the keys and values that its attention is to see: all
        exact ones on the model's device, or stand-ins for the draft face.

        Raises:
            CacheMisuseError: states that cannot follow what is held, or another prompt where that
                can be seen. The cache is unchanged then.
        """
        if self._first_forward:
            self._first_forward = False  # a refusal must leave nothing behind
            check_first_forward(self.get_seq_length(), attention_arguments(args, kwargs))
        if layer_idx == 0 or self.faces.attention is None:
            self.faces.attention = calling_attention()
            self._notice_plain_decoding(key_states)
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if self.faces.verifying and layer is not None and not isinstance(layer, SpeculativeLayer):
            self._verified[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _notice_plain_decoding(self, key_states: torch.Tensor) -> None:
        if not self.decoding and key_states.shape[2] == 1 and self.get_seq_length():
            notice_once(
                "SpeculativeKVCache decodes without drafts here, as an exact offloaded cache that "
                "moves everything for each token: pass custom_generate=draft_verify to "
                "generate, or call hf_kvcodecs.enable(model) once."
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = super().get_seq_length(layer_idx)
        return PromptLength(length, self) if self._first_forward and length else length

    @property
    def _is_user_defined(self) -> bool:
        return self._claimed_by_generate

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this at the start of each call: the one sign of a new prompt.
        self._claimed_by_generate = self._first_forward = value

    # A round: begin_draft, forwards on the draft face, begin_verify, one forward, commit.

    def begin_draft(self) -> None:
        """Turns to the draft face; forwards append to it until :meth:`begin_verify`.

        Compresses the exact face where that has not happened yet, and starts moving its first layer
        for the verification to come (:meth:`stage`).

        Raises:
            CacheMisuseError: nothing was read yet, several rows, or a layer that cannot be rolled
                back (linear attention).
        """
        self._check_draftable()
        if self.needs_compression:
            self.compress()
        self.stage(1)
        self._set_others_aside()
        self.faces.face = "draft"

    def stage(self, layers: int) -> None:
        """Starts moving so many layers more of the exact face, as far as ``staging_bytes`` reach.

        A few between one draft step and the next: to enqueue all of them at once would keep the
        device waiting for the first step.
        """
        self.faces.prefetch(layers)

    @property
    def needs_compression(self) -> bool:
        """Whether there is no draft face yet, or its exact tail has grown too long."""
        return any(
            layer.draft is None or layer.draft.tail_tokens > self.faces.refresh_tokens
            for layer in self.own_layers
        )

    @property
    def repeated_tokens(self) -> int:
        """Tokens that :meth:`repeating` has covered, and the padding before them."""
        covered = [0 if x.observed is None else x.observed.shape[1] for x in self.own_layers]
        return max(min(covered, default=0), self.faces.padding)

    @contextlib.contextmanager
    def repeating(self, start: int, stop: int) -> Iterator[None]:
        """Within it, a forward over a repetition of tokens ``start .. stop - 1`` is watched, and
        forgotten afterwards."""
        self.faces.face, self.faces.verifying = "full", False
        before = self.get_seq_length()
        self._set_others_aside()
        self.faces.repeating = start, stop
        try:
            yield
        finally:
            for layer in self.own_layers:
                layer.crop(before - layer.get_seq_length())
            self.faces.repeating = None
            self._restore_others()
            self._kept_aside = {}

    def _set_others_aside(self) -> None:
        self._kept_aside = {
            index: copy.copy(layer)
            for index, layer in enumerate(self.layers)
            if not isinstance(layer, SpeculativeLayer)
        }

    def _check_draftable(self) -> None:
        if not self.get_seq_length():
            raise CacheMisuseError("drafting needs a prompt first: this cache holds no tokens")
        if self.own_layers and self.own_layers[0].batch != 1:
            raise CacheMisuseError(
                f"drafts are made row by row, this cache has {self.own_layers[0].batch} rows; "
                "draft_verify splits them"
            )
        for index, layer in enumerate(self.layers):
            if hasattr(layer, "conv_states") or hasattr(layer, "recurrent_states"):
                raise CacheMisuseError(
                    f"layer {index} ({type(layer).__name__}) has a state that cannot be rolled "
                    "back: decode this model without draft_verify"
                )

    @property
    def drafts_statically(self) -> bool:
        """Whether a draft step may have a fixed shape: see ``graphs``."""
        own = self.own_layers
        possible = len(own) == len(self.layers) and self.compressor.reselect_rounds is None
        wanted = own[0].device.type == "cuda" if self.graphs is None and own else self.graphs
        return bool(possible and wanted)

    def drop_drafts(self, tokens: int = 0) -> None:
        """Forgets what was drafted, but for the first ``tokens`` drafted tokens."""
        for layer in self.own_layers:
            layer.cut_drafts(tokens)
        if self._kept_aside and tokens:
            raise CacheMisuseError("drafts of a model with sliding layers are dropped as a whole")
        self._restore_others()

    def begin_verify(self) -> None:
        """Forgets what was drafted and turns to the exact face; the next forward reads the last
        known token and the drafts."""
        self.drop_drafts()
        self._verified = {}
        self.faces.face, self.faces.verifying = "full", True
        self.faces.rounds += 1

    def commit(self, accepted: int, new_tokens: int) -> None:
        """Ends a round: of the ``new_tokens`` tokens just verified the first ``accepted`` stay, in
        both faces with the verifier's keys and values."""
        for layer in self.own_layers:
            layer.commit(accepted, new_tokens)
        self._restore_others()
        for index, (keys, values) in self._verified.items():
            if accepted:
                other: Any = self.layers[index]
                other.update(keys[:, :, :accepted], values[:, :, :accepted])
        self._verified, self._kept_aside = {}, {}
        self.faces.verifying = False

    def end_draft(self) -> None:
        """Back to the exact face, without a verification."""
        self.drop_drafts()
        self._kept_aside = {}
        self.faces.face, self.faces.verifying = "full", False

    def _restore_others(self) -> None:
        for index, layer in self._kept_aside.items():
            self.layers[index] = copy.copy(layer)

    def compress(self) -> None:
        """Makes the draft face from the exact one, which passes the device layer by layer, once for
        scores and once more where the budget is shared by all layers."""
        self.faces.compress(self.own_layers)

    # The contract of transformers' caches, where it concerns more than one layer.

    def reset(self) -> None:
        """Forgets everything, so that the object can serve another prompt."""
        super().reset()
        self.faces.clear()
        self._first_forward = False

    def dense(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values ``[batch, kv_heads, tokens, head_dim]`` of one layer, as copies of
        your own on the CPU."""
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, SpeculativeLayer):
            keys, values = self.faces.store.read(layer_idx)
            return keys.clone(), values.clone()
        return layer.keys.clone(), layer.values.clone()

    def report(self) -> DraftVerifyReport:
        """What the last ``generate`` with this cache did, see :class:`DraftVerifyReport`."""
        if self.last_report is None:
            raise ValueError("no report yet: generate with custom_generate=draft_verify first")
        return self.last_report

    def face_bytes(self) -> tuple[int, int, int]:
        """Bytes of the draft face (its tail counted), of the exact face as it crosses the link, and
        of as many tokens in transformers' own cache."""
        draft = full = dense = 0
        for layer in self.own_layers:
            draft += layer.draft.nbytes if layer.draft is not None else 0
            full += self.faces.store.layer_nbytes(layer.index)
            if layer.like is not None:
                rows = layer.batch * layer.kv_heads * layer.held
                dense += rows * sum(x.shape[3] * x.element_size() for x in layer.like)
        return draft, full, dense

    def row(self, index: int) -> SpeculativeKVCache:
        """A copy of one row of the batch, as a cache of its own."""
        row = copy.deepcopy(self)
        row.batch_select_indices(torch.tensor([index]))
        return row

    def join(self, rows: list[SpeculativeKVCache]) -> None:
        """Takes the contents of ``rows``, all of the same length, as its batch."""
        for index, layer in enumerate(self.layers):
            parts: list[Any] = [row.layers[index] for row in rows]
            if isinstance(layer, SpeculativeLayer):
                layer.join(parts)
            elif getattr(parts[0], "keys", None) is not None:
                joined: Any = copy.copy(parts[0])
                joined.keys = torch.cat([part.keys for part in parts])
                joined.values = torch.cat([part.values for part in parts])
                self.layers[index] = joined
        self.faces.begin_row()

    def __repr__(self) -> str:
        own = len(self.own_layers)
        return (
            f"SpeculativeKVCache({self.compressor.name}, {own} layers with two faces, "
            f"{len(self.layers) - own} others, exact face: {self.faces.store!r})"
        )


def _check_options(draft_length: int | str, staging_bytes: int | None, refresh_tokens: int) -> None:
    if draft_length != "auto" and (type(draft_length) is not int or draft_length < 1):
        raise ValueError(
            f"draft_length: expected 'auto' or a number of at least 1, got {draft_length!r}; try 25"
        )
    if staging_bytes is not None and (type(staging_bytes) is not int or staging_bytes < 0):
        raise ValueError(
            f"staging_bytes: expected None or a number of bytes, got {staging_bytes!r}"
        )
    if type(refresh_tokens) is not int or refresh_tokens < 1:
        raise ValueError(f"refresh_tokens: expected at least 1, got {refresh_tokens!r}")


def _compressor(compressor: str | Compressor, keep: float | None, bits: int | None) -> Compressor:
    if isinstance(compressor, str):
        return compressor_for(compressor, keep, bits)
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"compressor: expected a name or a Compressor, got {type(compressor).__name__}"
        )
    if keep is not None or bits is not None:
        raise ValueError("keep, bits: a Compressor has its own; give them with a name only")
    return compressor


def _store(full: str | FullStore, full_codec: str | None) -> FullStore:
    if full_codec is not None:
        if full_codec != "gaac" or full != "cpu":
            raise ValueError(
                f"full_codec: expected None, or 'gaac' with full='cpu', got {full_codec!r} with "
                f"full={full!r}"
            )
        return PackedStore()
    if isinstance(full, FullStore):
        return full
    if full not in STORES:
        raise ValueError(f"full: expected one of {', '.join(STORES)} or a store, got {full!r}")
    return STORES[full]()
