"""One layer of a :class:`SpeculativeKVCache`, and what its layers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..compressors import Compressor, LayerStates, repetition_attention
from ..errors import CacheMisuseError
from ..store.full import FullStore
from ..store.streaming import LayerStream, stream_for
from .attention_view import WatchedStates, views
from .draft import DraftLayer, DraftStates, StaticStep
from .split_attention import first_seen, split_attention

# Attention through which queries can be watched; None: nobody to ask, sdpa is the default.
WATCHABLE = (None, "sdpa")
SPARE_TOKENS = 64


@dataclass(slots=True)
class Faces:
    """What the layers of one cache share: where exact states lie, and which face is turned to the
    model.

    Attributes:
        face: "full" or "draft".
        verifying: the next forward's tokens are provisional until they are committed.
        attention: the attention implementation of the model that is calling.
        static: a draft step of fixed shape is being made, see :class:`StaticStep`.
        spare_tokens: rows of the drafts' tails beyond ``refresh_tokens``.
        padding: tokens at the left of the (single) row that are no text.
        starts: by layer the first token that the masks of this text's verifications let be seen, as
            the first of them showed.
        repeating: the part of the context that the model is repeating, None otherwise.
    """

    compressor: Compressor
    store: FullStore
    staging_bytes: int | None
    hold_decoded: bool
    refresh_tokens: int
    face: str = "full"
    verifying: bool = False
    rounds: int = 0
    static: StaticStep | None = None
    spare_tokens: int = SPARE_TOKENS
    attention: str | None = None
    padding: int = 0
    repeating: tuple[int, int] | None = None
    starts: dict[int, int | None] = field(default_factory=dict)
    streams: dict[torch.device, LayerStream] = field(default_factory=dict)

    def begin_row(self, padding: int = 0) -> None:
        """Another text, with so many tokens of padding at its left."""
        self.padding = padding
        self.starts.clear()

    def stream(self, device: torch.device) -> LayerStream:
        """The way from the store to ``device``."""
        if device not in self.streams:
            self.streams[device] = stream_for(self.store, device, self.staging_bytes)
        return self.streams[device]

    def prefetch(self, most: int | None = None) -> None:
        for stream in self.streams.values():
            stream.prefetch(most)

    def drop(self) -> None:
        """Forgets what was staged: the store has changed otherwise than by appending."""
        for stream in self.streams.values():
            stream.drop()

    def clear(self) -> None:
        self.drop()
        self.store.clear()
        self.face, self.verifying = "full", False
        self.begin_row()

    @property
    def reselecting(self) -> bool:
        """Whether this verification chooses anew what the draft face keeps."""
        every = self.compressor.reselect_rounds
        return every is not None and self.rounds % every == 0

    @property
    def bytes_read(self) -> int:
        return sum(stream.bytes_read for stream in self.streams.values())

    @property
    def held_staging_bytes(self) -> int:
        return sum(stream.staging_bytes for stream in self.streams.values())

    @property
    def watches(self) -> bool:
        """Whether queries are recorded."""
        wanted = self.compressor.window_tokens > 0 or self.repeating is not None
        return wanted and self.attention in WATCHABLE

    def compress(self, layers: list[SpeculativeLayer]) -> None:
        """Makes the draft face of every layer."""
        shared = self.compressor.dropper is not None and self.compressor.dropper.budget == "model"
        if not shared:
            for layer in layers:
                (kept,) = self._select([layer], [layer.score()])
                layer.compress(kept)
            return
        scores = [layer.score() for layer in layers]
        for layer, kept in zip(layers, self._select(layers, scores), strict=True):
            layer.compress(kept)

    def _select(
        self, layers: list[SpeculativeLayer], scores: list[torch.Tensor | None]
    ) -> list[list[torch.Tensor]]:
        tokens = layers[0].get_seq_length() - self.padding
        kept = self.compressor.select(scores, tokens, layers[0].kv_heads)
        return [[head + self.padding for head in layer] for layer in kept]


class SpeculativeLayer(CacheLayerMixin):
    """Exact keys and values in the store, compressed ones beside the model.

    The exact face is what every method of transformers' contract is about; the draft face covers
    the same tokens, or is None until it is needed.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, faces: Faces, index: int) -> None:
        # Not the base class's __init__, which assigns keys and values: here they are properties.
        self.faces, self.index = faces, index
        self.draft: DraftLayer | None = None
        self.drafted = 0  # tokens appended to the draft face beyond the exact one
        self.like: tuple[torch.Tensor, torch.Tensor] | None = None  # no tokens, the right dtypes
        self.queries: torch.Tensor | None = None  # [batch, q_heads, window, head_dim], the newest
        self.scale: float | None = None
        self.observed: torch.Tensor | None = None
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None  # being verified
        self.previous: torch.Tensor | None = None  # scores of the tokens before, if remembered
        self.parts: list[float] = []  # of its tokens that each head keeps
        self._reselected: DraftLayer | None = None
        self._fresh_queries: torch.Tensor | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # an attribute there
        return self.like is not None

    @property
    def stream(self) -> LayerStream:
        return self.faces.stream(self.device)

    @property
    def device(self) -> torch.device:
        return self.like[0].device if self.like else torch.device("cpu")

    @property
    def batch(self) -> int:
        return self.like[0].shape[0] if self.like else 0

    @property
    def batch_size(self) -> int:
        return self.batch

    @property
    def kv_heads(self) -> int:
        return self.like[0].shape[1] if self.like else 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # an attribute there
        """Every exact key ``[batch, kv_heads, tokens, head_dim]``, on the CPU; None before the
        first update."""
        return self.faces.store.read(self.index)[0] if self.like and self.held else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]  # an attribute there
        """Every exact value, like :attr:`keys`."""
        return self.faces.store.read(self.index)[1] if self.like and self.held else None

    @property
    def held(self) -> int:
        """Tokens of the exact face."""
        return self.faces.store.tokens(self.index)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """An empty layer for states like these."""
        self.like = key_states[:, :, :0].detach().clone(), value_states[:, :, :0].detach().clone()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens to the face turned to the model and returns what attention is to see.

        Raises:
            CacheMisuseError: states that cannot follow what is held; the layer is unchanged then.
        """
        self._check(key_states, value_states)
        if self.faces.face == "draft":
            assert self.draft is not None
            static = self.faces.static
            if static is not None:
                self.draft.append_at(key_states, value_states, static.cursor)
                tokens = self.get_seq_length() + 1
            else:
                self.draft.append(key_states, value_states)
                self.drafted += key_states.shape[2]
                tokens = self.get_seq_length()
            return views(DraftStates(self.draft, key_states, value_states, tokens, static))
        if self.like is None:
            self.lazy_initialization(key_states, value_states)
        if self.faces.verifying:
            self.fresh = key_states, value_states
        elif self.faces.repeating is None:
            self.draft = None  # it does not know these tokens
            self.faces.starts.pop(self.index, None)  # perhaps of another text
        keys, values = self.stream.extend(self.index, key_states, value_states)
        new = key_states.shape[2]
        splits = new > 1 and self.device.type == "cuda" and self.faces.attention in WATCHABLE
        if not self.faces.watches and not splits:
            return keys, values
        watch = partial(self._watch, keys, values) if self.faces.watches else None
        look = self._first_seen if self.faces.verifying else first_seen
        answer = partial(split_attention, look=look) if splits else None
        return views(WatchedStates(keys, values, new, watch, answer))

    def _first_seen(self, mask: torch.Tensor) -> int | None:
        """:func:`first_seen`. The verifications of one text have masks of one kind: the first one
        is looked at, and the host runs ahead of the device in the others."""
        starts = self.faces.starts
        if self.index not in starts:
            starts[self.index] = first_seen(mask)
        return starts[self.index]

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.requires_grad and torch.is_grad_enabled():
            raise CacheMisuseError(
                "keys require grad, but an offloaded cache carries no gradients: run the model "
                "under torch.no_grad() or torch.inference_mode()"
            )
        for name, states, like in zip(
            ("keys", "values"), (keys, values), self.like or (None, None), strict=True
        ):
            if like is None:
                continue
            given, held = (
                (*part.shape[:2], part.shape[3], part.dtype, part.device) for part in (states, like)
            )
            if given != held and self.get_seq_length():
                raise CacheMisuseError(
                    f"{name}: batch, kv_heads, head_dim, dtype and device {given}, but this cache "
                    f"holds {held}. Continue the same text with the same model, or call reset()"
                )
            if given != held:
                self.like = None

    def _watch(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        scale: float | None,
    ) -> None:
        """Keeps the newest queries, as many as the compressor wants to see."""
        self.scale = scale
        if self.faces.repeating is not None:
            self._observe(query, keys, *self.faces.repeating)
        elif self.faces.verifying:
            self._fresh_queries = query.clone()  # not all of them may stay
            if self.faces.reselecting and self.draft is not None:
                self._reselect(keys, values, query)
        else:
            self._add_queries(query)

    def _observe(self, query: torch.Tensor, keys: torch.Tensor, start: int, stop: int) -> None:
        """Notes what a repetition of tokens ``start .. stop - 1`` attends to."""
        context = keys.shape[2] - query.shape[2]
        seen = repetition_attention(query[0], keys[0], start, stop, context, self.scale)
        if self.observed is None:
            self.observed = seen.new_zeros((seen.shape[0], start))
        self.observed = torch.cat([self.observed[:, :start], seen], dim=1)

    def watch_verified(self, query: torch.Tensor) -> None:
        """What attention would show of the tokens being verified: their queries
        ``[1, q_heads, new, head_dim]``."""
        keys, values = self.stream.load(self.index)
        self._watch(keys, values, query, self.scale)

    def _add_queries(self, queries: torch.Tensor) -> None:
        window = self.faces.compressor.window_tokens
        newest = queries[:, :, -window:]
        missing = window - newest.shape[2]
        if missing and self.queries is not None:
            newest = torch.cat([self.queries[:, :, -missing:], newest], dim=2)
        self.queries = newest.clone()

    def score(self) -> torch.Tensor | None:
        """The compressor's scores ``[kv_heads, tokens]`` of the single row, padding left out."""
        if self.faces.compressor.dropper is None:
            return None
        keys, values = self.stream.load(self.index)
        return self._scores(keys, values, self.queries)

    def _scores(
        self, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor | None
    ) -> torch.Tensor:
        pad, compressor = self.faces.padding, self.faces.compressor
        assert compressor.dropper is not None
        scorer = compressor.dropper.scorer
        if queries is not None:
            window = min(scorer.window_tokens, keys.shape[2] - pad)
            queries = queries[0, :, queries.shape[2] - window :]
        scores = scorer.score(
            LayerStates(
                keys=keys[0, :, pad:],
                values=values[0, :, pad:],
                queries=queries,
                scale=self.scale,
                layer_idx=self.index,
                observed=None if self.observed is None else self.observed[:, pad:],
                previous=self.previous,
            )
        )
        if scorer.remembers:
            self.previous = scores
        return scores

    def compress(self, kept: list[torch.Tensor]) -> None:
        """Makes the draft face of the tokens at ``kept`` (by head)."""
        keys, values = self.stream.load(self.index)
        self.draft = self._draft_of(keys, values, kept)
        self.drafted = 0
        text = max(self.held - self.faces.padding, 1)
        self.parts = [index.shape[0] / text for index in kept]

    def _draft_of(
        self, keys: torch.Tensor, values: torch.Tensor, kept: list[torch.Tensor]
    ) -> DraftLayer:
        return DraftLayer(
            keys,
            values,
            kept,
            self.faces.compressor,
            spare_tokens=self.faces.refresh_tokens + self.faces.spare_tokens,
            hold_decoded=self.faces.hold_decoded,
        )

    def _reselect(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor) -> None:
        """Chooses what to keep anew, of the tokens before those being verified."""
        dropper = self.faces.compressor.dropper
        assert dropper is not None
        known, pad = keys.shape[2] - query.shape[2], self.faces.padding
        queries = query if self.queries is None else torch.cat([self.queries, query], dim=2)
        scores = self._scores(keys, values, queries)[:, : known - pad]
        if self.previous is not None:
            self.previous = self.previous[:, : known - pad]
        kept = [index + pad for index in dropper.reselect(scores.clone(), self.parts)]
        self._reselected = self._draft_of(keys, values, kept)

    @property
    def memory_bytes(self) -> int:
        """Bytes on the device beside the draft face: scores that are remembered."""
        return self.previous.nbytes if self.previous is not None else 0

    def advance(self, tokens: int) -> None:
        """Counts drafted tokens that a static step wrote."""
        assert self.draft is not None
        self.draft.tail_tokens += tokens
        self.drafted += tokens

    def cut_drafts(self, tokens: int) -> None:
        """Keeps the first ``tokens`` of the drafted tokens."""
        if self.draft is not None and self.drafted > tokens:
            self.draft.cut_tail(self.draft.tail_tokens - self.drafted + tokens)
            self.drafted = tokens

    def commit(self, accepted: int, new_tokens: int) -> None:
        """Of the tokens just verified the first ``accepted`` stay, in both faces."""
        assert self.fresh is not None
        keys, values = (part[:, :, :accepted] for part in self.fresh)
        self.faces.store.crop(self.index, self.held - new_tokens + accepted)
        if self._reselected is not None:
            self.draft, self._reselected = self._reselected, None
        if self.draft is not None and accepted:
            self.draft.append(keys, values)
        if self._fresh_queries is not None and accepted:
            self._add_queries(self._fresh_queries[:, :, :accepted])
        self.fresh = self._fresh_queries = None

    # transformers' contract, about the exact face

    def get_seq_length(self) -> int:
        return self.held + self.drafted if self.like else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.faces.store.crop(self.index, 0)
        self.like = self.draft = self.queries = self.observed = self.fresh = None
        self.previous = self._reselected = None
        self.drafted = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the newest ``-tokens_to_remove`` tokens."""
        tokens_to_remove = int(tokens_to_remove)  # 5.17 hands a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                "crop: expected 0 or a negative number of tokens to remove, got "
                f"{tokens_to_remove}; absolute lengths are gone from transformers"
            )
        if not self.like or not tokens_to_remove:
            return
        removed = min(-tokens_to_remove, self.held)
        self.faces.store.crop(self.index, self.held - removed)
        if self.faces.repeating is not None:  # what is taken back was never in the draft face
            return
        if self.draft is not None and removed <= self.draft.tail_tokens:
            self.draft.cut_tail(self.draft.tail_tokens - removed)
        else:
            self.draft = None
        if self.queries is not None:
            self.queries = self.queries[:, :, : max(self.queries.shape[2] - removed, 0)]
        if self.observed is not None:
            self.observed = self.observed[:, : self.held]
        if self.previous is not None:
            self.previous = self.previous[:, : max(self.held - self.faces.padding, 0)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps rows ``indices`` (int64 or bool) of the batch, in that order."""
        if not self.like:
            return
        indices = torch.as_tensor(indices).cpu()
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        indices = torch.where(indices < 0, indices + self.batch, indices)
        self.faces.store.select_rows(self.index, indices)
        self.faces.drop()
        here = indices.to(self.device)
        self.like = self.like[0].index_select(0, here), self.like[1].index_select(0, here)
        if self.queries is not None:
            self.queries = self.queries.index_select(0, here)
        self.draft = self.observed = self.previous = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def join(self, rows: list[SpeculativeLayer]) -> None:
        """Takes the rows of other layers as its batch."""
        if not rows[0].like:
            return
        parts = [row.faces.store.read(self.index) for row in rows]
        keys, values = (torch.cat([part[side] for part in parts]) for side in (0, 1))
        self.faces.store.replace(self.index, keys, values)
        self.faces.drop()
        likes = [row.like for row in rows if row.like]
        self.like = torch.cat([like[0] for like in likes]), torch.cat([like[1] for like in likes])
        self.queries = None
        if all(row.queries is not None for row in rows):
            newest = min(row.queries.shape[2] for row in rows if row.queries is not None)
            self.queries = torch.cat(
                [row.queries[:, :, -newest:] for row in rows if row.queries is not None]
            )
        self.draft = self.observed = self.previous = None

    def offload(self) -> None:
        """Nothing to do: the exact face is offloaded already."""

    def prefetch(self) -> None:
        """Nothing to do: layers are fetched as they are needed."""

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else f"drafts on {sum(self.draft.counts)} kept"
        return f"SpeculativeLayer({self.held} tokens, {draft})"
