"""How many drafted tokens a compressed cache has accepted: a replay of greedy decoding.

What plain ``generate`` says is known beforehand, so a draft need not be made token by token: the
draft face reads the right continuation at once, and the first token that it would have said
differently ends the draft. The rounds are those of ``draft_verify``, at a tenth of the time.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import texts
import torch
from transformers import DynamicCache

from hf_kvcodecs import SpeculativeKVCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.compressors import Compressor, Dropper, ExpectedAttention, KVzip
from hf_kvcodecs.generation.inputs import RowInputs
from hf_kvcodecs.generation.repetition import repeat_context

LOOP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt, its greedy continuation, and the exact states of both.

    Attributes:
        kind: what text it is.
        tokens: int64 ``[prompt + new]``.
        prompt_tokens: how many of them are the prompt.
        cache: holds the prompt, 256 queries and KVzip's observations.
        states: by layer, keys and values of the continuation and its queries.
    """

    kind: str
    tokens: torch.Tensor
    prompt_tokens: int
    cache: SpeculativeKVCache
    states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def in_loop(self, position: int) -> bool:
        """Whether what follows ``position`` was said before, word for word."""
        new = self.tokens[self.prompt_tokens :].tolist()
        start = position - self.prompt_tokens
        ahead = new[start : start + LOOP_TOKENS]
        before = range(max(0, start - LOOP_TOKENS + 1))
        return any(new[first : first + LOOP_TOKENS] == ahead for first in before)


def prompts(tokenizer: Any, count: int, tokens: int) -> Iterator[tuple[str, torch.Tensor]]:
    """``count`` prompts of ``tokens`` tokens: code, prose and chat in turn."""
    kinds = {"code": texts.code_text(), "prose": texts.prose_text(), "chat": texts.chat_text()}
    each = -(-count // len(kinds))
    pieces = {kind: texts.pieces(tokenizer, text, [tokens] * each) for kind, text in kinds.items()}
    for index in range(count):
        kind = list(kinds)[index % len(kinds)]
        piece = pieces[kind][index // len(kinds)]
        yield kind, tokenizer(piece, add_special_tokens=False, return_tensors="pt").input_ids


class _Recorder(ExpectedAttention):
    """Records the queries of the prompt and of its continuation."""

    window_tokens = 512


@torch.no_grad()
def reference(model: Any, kind: str, ids: torch.Tensor, new_tokens: int) -> Reference:
    """The greedy continuation of ``ids`` ``[1, tokens]``, and all that replays need."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **{CACHE_ARGUMENT: DynamicCache()},
    )
    prompt_tokens = ids.shape[1]
    cache = SpeculativeKVCache(
        compressor=Compressor(dropper=Dropper(scorer=KVzip(chunk_tokens=512), keep=0.5))
    )
    arguments = {CACHE_ARGUMENT: cache}
    model(ids, logits_to_keep=1, **arguments)
    repeat_context(RowInputs(model, cache, {}, prompt_tokens), ids)
    # The same object with a scorer that wants queries: what it records is what others will get.
    cache.faces.compressor = Compressor(dropper=Dropper(scorer=_Recorder(), keep=0.5))
    again = copy.deepcopy(cache)
    again.reset()
    model(out[:, :-1], logits_to_keep=1, **{CACHE_ARGUMENT: again})
    states = []
    for ours, full in zip(cache.own_layers, again.own_layers, strict=True):
        keys, values = again.dense(full.index)
        new = keys.shape[2] - prompt_tokens
        states.append(
            (
                keys[:, :, prompt_tokens:].clone(),
                values[:, :, prompt_tokens:].clone(),
                full.queries[:, :, -new:].clone(),
            )
        )
        ours.queries = full.queries[:, :, -new - 256 : -new].clone()
        ours.scale = full.scale
    return Reference(kind, out[0], prompt_tokens, cache, states)


def fresh_cache(made: Reference, compressor: Compressor) -> SpeculativeKVCache:
    """A cache with that compressor which has read the prompt."""
    cache = SpeculativeKVCache(compressor=compressor, hold_decoded=True)
    for layer in made.cache.own_layers:
        ours = cache._new_layer()
        cache.layers.append(ours)
        keys, values = made.cache.faces.store.read(layer.index)
        ours.lazy_initialization(keys, values)
        cache.faces.store.append(layer.index, keys, values)
        ours.scale, ours.observed = layer.scale, layer.observed
        window = compressor.window_tokens
        ours.queries = layer.queries[:, :, -window:] if window else None
    return cache


@torch.no_grad()
def replay(
    model: Any, made: Reference, compressor: Compressor, draft_length: int, stop: int
) -> list[dict[str, Any]]:
    """The rounds until ``stop`` new tokens are there: accepted tokens, loops, bytes."""
    cache = fresh_cache(made, compressor)
    began = time.perf_counter()
    cache.compress()
    compress_seconds = time.perf_counter() - began
    rows = []
    position = made.prompt_tokens
    while position - made.prompt_tokens < stop:
        cache.begin_draft()
        known = made.tokens[position : position + draft_length]
        logits = model(known[None], **{CACHE_ARGUMENT: cache}).logits[0]
        wanted = made.tokens[position + 1 : position + draft_length + 1]
        accepted = int((logits.argmax(-1) == wanted).long().cumprod(0).sum())
        rows.append(
            {
                "accepted": accepted,
                "loop": made.in_loop(position + 1),
                "bytes_part": bytes_part(cache),
                "compress_seconds": compress_seconds,
            }
        )
        verify(cache, made, position, accepted + 1)
        position += accepted + 1
    return rows


def bytes_part(cache: SpeculativeKVCache) -> float:
    """Bytes of the draft face by those of the exact one, were the model a bf16 one."""
    drafts = dense = 0
    for layer in cache.own_layers:
        drafts += layer.draft.nbytes_at(2, 2) + layer.memory_bytes
        dense += layer.batch * layer.kv_heads * layer.held * sum(layer.draft.head_dims) * 2
    return drafts / dense


def verify(cache: SpeculativeKVCache, made: Reference, position: int, tokens: int) -> None:
    """Commits the next ``tokens`` tokens with their exact states, as a verification would."""
    start = position - made.prompt_tokens
    cache.begin_verify()
    for layer, (keys, values, queries) in zip(cache.own_layers, made.states, strict=True):
        part = slice(start, start + tokens)
        layer.update(keys[:, :, part], values[:, :, part])
        if cache.compressor.window_tokens:
            layer.watch_verified(queries[:, :, part])
    cache.commit(tokens, tokens)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over rounds, loops included and excluded."""
    accepted = [row["accepted"] for row in rows]
    without = [row["accepted"] for row in rows if not row["loop"]]
    return {
        "accepted": statistics.fmean(accepted),
        "accepted_without_loops": statistics.fmean(without) if without else None,
        "standard_error": statistics.stdev(accepted) / len(accepted) ** 0.5,
        "rounds": len(rows),
        "rounds_in_loops": sum(row["loop"] for row in rows),
        "bytes_part": statistics.fmean(row["bytes_part"] for row in rows),
        "compress_seconds": statistics.fmean(row["compress_seconds"] for row in rows),
    }
