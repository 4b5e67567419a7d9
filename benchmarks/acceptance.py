"""How many drafted tokens a compressed cache has accepted: a replay of greedy decoding.

What plain ``generate`` says is known beforehand, so a draft need not be made token by token: the
draft face reads the right continuation at once, and the first token that it would have said
differently ends the draft. The rounds are those of ``draft_verify``, at a tenth of the time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import texts
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_kvcodecs import SpeculativeKVCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.compressors import Compressor, Dropper, ExpectedAttention, KVzip
from hf_kvcodecs.generation.inputs import RowInputs
from hf_kvcodecs.generation.repetition import repeat_context

LOOP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class LayerReference:
    """The exact states of one layer: prompt and continuation, fp32.

    Attributes:
        keys, values: ``[1, kv_heads, tokens, head_dim]``.
        queries: ``[1, q_heads, newest, head_dim]``: 256 of the prompt, all of the continuation.
        observed: what KVzip saw while the prompt was repeated, ``[kv_heads, prompt]``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    observed: torch.Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and its greedy continuation.

    Attributes:
        kind: what text it is.
        tokens: int64 ``[prompt + new]``; the last one has no states.
        prompt_tokens: how many of them are the prompt.
    """

    kind: str
    tokens: torch.Tensor
    prompt_tokens: int
    layers: list[LayerReference]

    def in_loop(self, position: int) -> bool:
        """Whether what follows ``position`` was said before, word for word."""
        new = self.tokens[self.prompt_tokens :].tolist()
        start = position - self.prompt_tokens
        ahead = new[start : start + LOOP_TOKENS]
        before = range(max(0, start - LOOP_TOKENS + 1))
        return any(new[first : first + LOOP_TOKENS] == ahead for first in before)

    def save(self, path: Path) -> None:
        """Writes it to a safetensors file."""
        tensors = {"tokens": self.tokens}
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                tensors[f"{field.name}.{index}"] = getattr(layer, field.name).contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        facts = {"kind": self.kind, "prompt_tokens": str(self.prompt_tokens)}
        save_file(tensors, partial, metadata=facts)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Reference:
        """The reference that :meth:`save` wrote."""
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
            names = [field.name for field in fields(LayerReference)]
            count = sum(key.startswith("keys.") for key in file.keys())
            layers = [
                LayerReference(**{name: file.get_tensor(f"{name}.{index}") for name in names})
                for index in range(count)
            ]
            tokens = file.get_tensor("tokens")
        return cls(facts["kind"], tokens, int(facts["prompt_tokens"]), layers)


def prompts(tokenizer: Any, count: int, tokens: int) -> Iterator[tuple[str, torch.Tensor]]:
    """``count`` prompts of ``tokens`` tokens: code, prose and chat in turn."""
    kinds = {"code": texts.code_text(), "prose": texts.prose_text(), "chat": texts.chat_text()}
    each = -(-count // len(kinds))
    pieces = {kind: texts.pieces(tokenizer, text, [tokens] * each) for kind, text in kinds.items()}
    for index in range(count):
        kind = list(kinds)[index % len(kinds)]
        piece = pieces[kind][index // len(kinds)]
        ids = tokenizer(piece, add_special_tokens=False, return_tensors="pt").input_ids
        yield kind, ids[:, :tokens]


class _Recorder(ExpectedAttention):
    """Records the queries of the prompt's end and of its continuation."""

    window_tokens = 512


def references(
    model: Any, tokenizer: Any, count: int, tokens: int, new_tokens: int, folder: Path
) -> Iterator[Reference]:
    """A reference for each prompt, made once and kept in ``folder``."""
    for kind, ids in prompts(tokenizer, count, tokens):
        name = texts.digest(f"{tokenizer.name_or_path} {ids.tolist()} {new_tokens}")
        path = folder / f"{name}.safetensors"
        if not path.exists():
            reference(model, kind, ids, new_tokens).save(path)
        yield Reference.load(path)


@torch.no_grad()
def reference(model: Any, kind: str, ids: torch.Tensor, new_tokens: int) -> Reference:
    """The greedy continuation of ``ids`` ``[1, tokens]``, and all that replays need."""
    cache = SpeculativeKVCache(compressor=Compressor(dropper=Dropper(scorer=_Recorder(), keep=0.5)))
    cache.decoding = True  # plain decoding is what is wanted here
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **{CACHE_ARGUMENT: cache},
    )
    new, layers = new_tokens - 1, []
    states = [(*cache.dense(layer.index), layer.queries) for layer in cache.own_layers]
    cache.faces.compressor = Compressor(dropper=Dropper(scorer=KVzip(chunk_tokens=512), keep=0.5))
    cache.crop(-new)
    repeat_context(RowInputs(model, cache, {}, ids.shape[1]), ids)
    for layer, (keys, values, queries) in zip(cache.own_layers, states, strict=True):
        recorded = queries[:, :, -new - 256 :]
        layers.append(LayerReference(keys, values, recorded, layer.observed))
    return Reference(kind, out[0], ids.shape[1], layers)


def fresh_cache(made: Reference, compressor: Compressor) -> SpeculativeKVCache:
    """A cache with that compressor which has read the prompt."""
    cache = SpeculativeKVCache(compressor=compressor, hold_decoded=True)
    new, window = made.tokens.shape[0] - 1 - made.prompt_tokens, compressor.window_tokens
    for index, states in enumerate(made.layers):
        layer = cache._new_layer()
        cache.layers.append(layer)
        layer.lazy_initialization(states.keys, states.values)
        part = slice(0, made.prompt_tokens)
        cache.faces.store.append(index, states.keys[:, :, part], states.values[:, :, part])
        layer.observed = states.observed
        if window:
            layer.queries = states.queries[:, :, : states.queries.shape[2] - new][:, :, -window:]
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
    cache.begin_verify()
    part = slice(position, position + tokens)
    for layer, states in zip(cache.own_layers, made.layers, strict=True):
        layer.update(states.keys[:, :, part], states.values[:, :, part])
        if cache.compressor.window_tokens:
            first = position - (states.keys.shape[2] - states.queries.shape[2])
            layer.watch_verified(states.queries[:, :, first : first + tokens])
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
