"""``ChunkReuseCache``: a drop-in transformers cache that fills itself with text seen before."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from ...errors import CacheMisuseError
from ...store import Chunk, ChunkStore
from ...store.chunk import KV
from ..compat import notice_once
from .assembly import Assembly, Flags, RowMatch, assemble, find
from .ends import ends_of, vocabulary_ends
from .hooks import attach
from .identity import ModelState, model_identity, model_state
from .layer import ScatterLayer
from .prompt import NoReuse, Prompt, read_on, read_prompt
from .repair import PROBED_LAYER, REPAIRS, deviating_rows, probe, selected_rows
from .report import ReuseReport
from .rows import layout
from .support import check_attention, check_model, inner_model, rotation_now
from .verified import OnProvisional, check_options, nothing_known, without_decoder
from .warm import warm
from .writing import RowText, append_ids, slice_states


class ChunkReuseCache(Cache):
    """Keys and values of text seen before, at the beginning of the prompt or anywhere in it.

    ``model.generate(**inputs, past_key_values=ChunkReuseCache(model, store))`` is all: what the
    store knows is not computed again, and what is new, the reply included, goes into the store. The
    beginning of a prompt seen before is reused exactly, with the very numbers of the prefill that
    computed them. Text seen elsewhere is moved to its new place and repaired there, which is an
    approximation. One object serves one text, like any cache; make a new one for each call.

    Args:
        model: the model that will use the cache. It carries two hooks while such caches live.
        store: shared by any number of caches, threads and models.
        repair: what is recomputed of moved text: "selective" its first and last rows and those that
            gather attention, "cacheblend" also the rows that deviate most in a probe of the lowest
            layers, "none" nothing. "exact" uses no moved text at all, only beginnings.
        recompute_ratio: the share of moved tokens that "cacheblend" recomputes, 0 to 1.
        verify: text is moved for drafts only, which :func:`draft_verify` checks against the exact
            prefill: the result is that of ``repair="exact"``. Without that decoder it is computed
            so at once.
        draft_length: with ``verify``, provisional tokens per row at most.
        on_provisional: with ``verify``, called behind each provisional token with all of them so
            far, int64 ``[batch, drafted]`` on the model's device. They may be wrong, and are never
            in a result; rows that have ended are padded.
        tokenizer: where paragraphs end; None takes the one beside the model's weights.

    Raises:
        ValueError: an option out of range, or a model in which text cannot be moved.
    """

    layers: Any  # ScatterLayers, all of them

    def __init__(
        self,
        model: Any,
        store: ChunkStore,
        *,
        repair: str = "selective",
        recompute_ratio: float = 0.15,
        verify: bool = False,
        draft_length: int = 16,
        on_provisional: OnProvisional | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_options(verify, draft_length, on_provisional)
        if repair not in REPAIRS:
            raise ValueError(f"repair: expected one of {', '.join(REPAIRS)}, got {repair!r}")
        if not 0 <= recompute_ratio <= 1:
            raise ValueError(f"recompute_ratio: expected 0 to 1, got {recompute_ratio!r}")
        if not isinstance(store, ChunkStore):
            raise TypeError(f"store: expected a ChunkStore, got {type(store).__name__}")
        self.model, self.store = inner_model(model), store
        self.repair, self.recompute_ratio = repair, recompute_ratio
        self.rotation = check_model(self.model)
        self._moves = repair != "exact"
        self.verify, self.draft_length, self.on_provisional = verify, draft_length, on_provisional
        self.decoding = False  # by the decoder that verifies
        self.drafting = False  # it verifies what comes now
        self._ends = vocabulary_ends(self.model, tokenizer)
        super().__init__(layers=[ScatterLayer() for _ in self.rotation.layers])
        self._forget()
        attach(self, self.model)

    def _forget(self) -> None:
        self._space: Any = None
        self._identity = ""
        self._state: ModelState | None = None
        self._texts: list[RowText] | None = None  # None: nothing may be written
        self._prompt: tuple[Prompt, list[RowMatch]] | None = None  # in the first forward call
        self._running = self._generating = False
        self.unverified = False  # holds moved text that only a draft may be made of
        self._began = 0.0
        self._report = ReuseReport()

    def before_forward(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Called by the hook: the arguments with which the model is to run."""
        self._began = time.perf_counter()
        self._check_call(kwargs)
        generating, self._generating = self._generating, False
        if self.get_seq_length():
            self._read_on(kwargs, new_call=generating)
        else:
            try:
                kwargs = self._first_forward(kwargs, last_logits_only=generating)
            except NoReuse as reason:
                notice_once(f"ChunkReuseCache runs without its store: {reason}.")
                self._texts = None
        self._running = True
        return kwargs

    def _check_call(self, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            raise CacheMisuseError(
                "ChunkReuseCache has no gradients for what it reuses: call the model under "
                "torch.no_grad() (generate does)"
            )
        if kwargs.get("use_cache") is False:
            raise CacheMisuseError("use_cache=False was given together with a cache: leave out one")
        check_attention(self.model)

    def _first_forward(self, kwargs: dict[str, Any], *, last_logits_only: bool) -> dict[str, Any]:
        if self.verify and not self.decoding:
            without_decoder()
        prompt = read_prompt(kwargs, self.model.config, last_logits_only=last_logits_only)
        state = self._state = model_state(self.model)
        if state.trains:
            raise NoReuse("the model is in training mode, where dropout may be; call model.eval()")
        if state.hooked:
            raise NoReuse(f"hooks on its {state.hooked[0]} may change what the model computes")
        self._identity = model_identity(self.model, state)
        self.rotation = rotation_now(self.model, self._identity)
        space = self._space = self.store.space(self._identity)
        space.like = self.rotation.like
        self._texts = [
            RowText.begin(space.salt, ids, pad, position)
            for ids, pad, position in zip(prompt.rows, prompt.pads, prompt.positions, strict=True)
        ]
        rows, loaded = self._find(prompt)
        self._prompt = prompt, rows
        total = sum(row.tokens for row in rows)
        seconds = time.perf_counter() - self._began
        self._report = ReuseReport(total_tokens=total, lookup_seconds=seconds)
        if not loaded:
            return kwargs
        ids = kwargs["input_ids"]
        made = assemble(prompt, rows, loaded, self.rotation, ids.device)
        looked_up = time.perf_counter()
        wanted = self._wanted(prompt, made, ids)
        repaired = time.perf_counter()
        self._count(made, wanted, looked_up - self._began, repaired - looked_up)
        if self.verify and self._report.moved_tokens:
            self.unverified, self._texts = True, None
        return self._arguments(kwargs, prompt, made, wanted)

    def _find(self, prompt: Prompt) -> tuple[list[RowMatch], dict[Chunk, KV]]:
        if self.drafting or not self.verify:
            return find(prompt, self._space, moves=self._moves)
        if not self.store.exact:
            return nothing_known(prompt), {}
        return find(prompt, self._space, moves=False)

    def _wanted(self, prompt: Prompt, made: Assembly, ids: torch.Tensor) -> list[Flags]:
        """For each row which tokens run through the model."""
        wanted = [match.missing() for match in made.rows]
        if self.repair == "none" or not any(match.moved for match in made.rows):
            return wanted
        for row, (flags, match) in enumerate(zip(wanted, made.rows, strict=True)):
            flags |= selected_rows(match, made.keys, row, prompt.pads[row])
        if self.repair == "cacheblend" and self.recompute_ratio and len(self.layers) > PROBED_LAYER:
            with torch.no_grad():
                found = probe(self.model, prompt, made, ids, self._needs_float_mask)
            wanted = [
                flags | deviating_rows(match, deviation, self.recompute_ratio)
                for flags, match, deviation in zip(wanted, made.rows, found, strict=True)
            ]
        return wanted

    @property
    def _needs_float_mask(self) -> bool:
        return bool(self.model.config._attn_implementation != "sdpa")

    def _arguments(
        self, kwargs: dict[str, Any], prompt: Prompt, made: Assembly, wanted: list[Flags]
    ) -> dict[str, Any]:
        """``kwargs`` for the wanted tokens alone, the layers waiting for them."""
        ids = kwargs["input_ids"]
        held = _common_prefix(prompt, wanted)
        if held is not None:  # nothing but a prefix: the model's own way on, bit for bit
            columns = torch.arange(held, prompt.columns, device=ids.device).expand(len(ids), -1)
            kwargs = kwargs | {"input_ids": ids[:, held:]}
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][:, held:]
        else:
            held = 0
            plan = layout(prompt, wanted, ids, self._needs_float_mask, made.keys[0].dtype)
            columns = plan.columns
            kwargs = kwargs | plan.arguments()
        kwargs.pop("cache_position", None)
        for layer, keys, values in zip(self.layers, made.keys, made.values, strict=True):
            layer.fill(keys, values, columns, held)
        return kwargs

    def _count(
        self, made: Assembly, wanted: list[Flags], lookup_seconds: float, repair_seconds: float
    ) -> None:
        computed = sum(int(flags.sum()) for flags in wanted)
        missing = sum(int(match.missing().sum()) for match in made.rows)
        exact = sum(match.exact_tokens for match in made.rows)
        moved = sum(match.moved_tokens for match in made.rows)
        if not self.store.exact:
            exact, moved = 0, moved + exact
        batch, _, columns, _ = made.keys[0].shape
        token_bytes = sum(t.nbytes for t in (*made.keys, *made.values)) // (batch * columns)
        self._report = replace(
            self._report,
            exact_tokens=exact,
            moved_tokens=moved,
            recomputed_tokens=computed - missing,
            reused_bytes=token_bytes * (self._report.total_tokens - computed),
            lookup_seconds=lookup_seconds,
            repair_seconds=repair_seconds,
        )

    def _read_on(self, kwargs: dict[str, Any], *, new_call: bool) -> None:
        """Notes the tokens of a later forward call."""
        texts, held = self._texts, self.get_seq_length()
        if texts is None:
            return
        try:
            pads, positions = [text.pad for text in texts], [text.position for text in texts]
            if any(len(text.ids) != held - text.pad for text in texts):
                raise NoReuse("its layers were changed by others")
            rows = read_on(kwargs, held, pads, positions)
        except NoReuse as reason:
            self.flush()  # what was computed until here
            notice_once(f"ChunkReuseCache does not store what follows: {reason}.")
            self._texts = None
            return
        if not self._is_same_model(thorough=new_call or len(rows[0]) > 1):
            self._texts = None  # whose the numbers since the last look are is unknown
            return
        if new_call:
            self._write_reply()
        for text, new in zip(texts, rows, strict=True):
            text.ids = append_ids(text.ids, new)

    def _is_same_model(self, *, thorough: bool) -> bool:
        """Whether the model is still the one that read the prompt; weights are looked at only if
        ``thorough``, which takes as long as a small layer."""
        state = model_state(self.model)
        if state != self._state:
            return False
        return not thorough or model_identity(self.model, state) == self._identity

    def after_forward(self, finished: bool) -> None:
        """Called by the hook when the model is done, or has failed."""
        if not self._running:  # refused before it ran: nothing has changed
            return
        self._running = False
        prompt, self._prompt = self._prompt, None
        if not finished:
            self.reset()
        elif prompt is not None:
            self._write_prompt(*prompt)
            seconds = time.perf_counter() - self._began
            self._report = replace(self._report, prefill_seconds=seconds)

    def _write_prompt(self, prompt: Prompt, rows: list[RowMatch]) -> None:
        if self._texts is None:
            return
        stored = 0
        for row, (text, match) in enumerate(zip(self._texts, rows, strict=True)):
            states = slice_states(self.layers, row, text.pad)
            ends = ends_of(text.ids, self._ends)
            stored += text.write_prompt(self._space, match, states, ends)
        self._report = replace(self._report, stored_tokens=self._report.stored_tokens + stored)

    def flush(self) -> None:
        """Writes to the store what is not there yet: the reply so far. Happens by itself when the
        object is deleted."""
        length = self.get_seq_length()
        if all(min(len(t.ids), length - t.pad) <= t.written for t in self._texts or ()):
            return
        if self._is_same_model(thorough=True):
            self._write_reply()
        else:  # weights or adapters changed: whose numbers these are is unknown
            self._texts = None

    def _write_reply(self) -> None:
        stored, length = 0, self.get_seq_length()
        for row, text in enumerate(self._texts or ()):
            held = min(len(text.ids), length - text.pad)
            if held > text.written:
                states = slice_states(self.layers, row, text.pad)
                stored += text.write(self._space, states, ends_of(text.ids, self._ends), held)
        self._report = replace(self._report, stored_tokens=self._report.stored_tokens + stored)

    def warm(
        self,
        ids: torch.Tensor,
        *,
        sink_ids: torch.Tensor | None = None,
        overlap_tokens: int = 128,
        pin: bool = False,
    ) -> int:
        """Puts a document into the store ahead of any prompt; how many tokens were new.

        The document is read as one text behind sink tokens, which take the attention that the first
        tokens of any text attract; one longer than the model's context in windows that overlap.
        What this cache itself holds is left alone.

        Args:
            ids: int64 ``[1, tokens]``.
            sink_ids: int64 ``[1, tokens]``; None for the model's bos token, if it has one.
            overlap_tokens: what neighbouring windows share.
            pin: keep it in memory whatever else comes, until ``store.clear()``.

        Raises:
            ValueError: more than one document, or an overlap as long as the model's context.
        """

        def new_cache() -> ChunkReuseCache:
            cache = ChunkReuseCache(self.model, self.store, repair=self.repair)
            cache._ends, cache._moves = self._ends, False  # every number from a real prefill
            return cache

        return warm(self.model, new_cache, ids, sink_ids, overlap_tokens, pin)

    def pin(self, pinned: bool = True) -> None:
        """Keeps what the store has of this text from eviction, or no longer."""
        for text in self._texts or ():
            self._space.pin_text(text.ids, text.position, pinned)

    def report(self) -> ReuseReport:
        """What became of the latest prompt."""
        return self._report

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the states of a layer, at their places; returns all of them.

        Raises:
            CacheMisuseError: the caller is not the model that the cache was made with, so that
                nobody said which tokens these are.
        """
        if not self._running:
            raise CacheMisuseError(
                "ChunkReuseCache is used by another model than the one it was made with, or by a "
                "part of it: call the very model of ChunkReuseCache(model, store)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this when it starts; it looks at the last logits only.
        self._generating = value

    def reset(self) -> None:
        """Forgets everything (not the store's chunks), so that the object can serve another
        prompt."""
        for layer in self.layers:
            layer.keys = layer.values = layer.columns = None
            layer.is_initialized = False
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the newest ``-tokens_to_remove`` tokens."""
        super().crop(tokens_to_remove)
        for text in self._texts or ():
            text.ids = text.ids[: max(self.get_seq_length() - text.pad, 0)]
            if text.written > len(text.ids):  # what was written goes on otherwise now
                self._texts = None
                break

    def reorder_cache(self, beam_idx: Any) -> None:
        """Rows ``beam_idx`` of the batch, in that order."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Rows ``indices`` of the batch, in that order."""
        super().batch_select_indices(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._select(np.arange(len(self._texts or ())).repeat(repeats).tolist())

    def _select(self, rows: list[int]) -> None:
        if self._texts is not None:
            self._texts = [self._texts[row].copy() for row in rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkReuseCache:
        """A copy of the contents; the model and the store are the same."""
        new = copy.copy(self)
        new.layers = copy.deepcopy(self.layers, memo)
        new._texts = None if self._texts is None else [text.copy() for text in self._texts]
        attach(new, new.model)
        return new

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_texts", None):
            self.store.lock.soon(self.flush)

    def __repr__(self) -> str:
        return (
            f"ChunkReuseCache({self.get_seq_length()} tokens in {len(self.layers)} layers, repair="
            f"{self.repair!r}, recompute_ratio={self.recompute_ratio}, {self.store!r})"
        )


def _common_prefix(prompt: Prompt, wanted: list[Flags]) -> int | None:
    """The column behind which every row's tokens are all wanted and before which none is; None if
    there is no such column."""
    begins = {pad + int(np.argmax(flags)) for pad, flags in zip(prompt.pads, wanted, strict=True)}
    if len(begins) > 1 or any(not flags[np.argmax(flags) :].all() for flags in wanted):
        return None
    return begins.pop()
