"""``draft_verify``: what plain ``generate`` says, drafted on the compressed face of the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..caches.chunk_reuse import ChunkReuseCache
from ..caches.compat import CACHE_ARGUMENT, generate_arguments
from ..caches.speculative import SpeculativeKVCache
from ..caches.speculative_report import DraftVerifyReport
from .assistant import AssistantProposer
from .inputs import RowInputs
from .row import RowDecoder
from .verified_reuse import VerifiedReuse


def draft_verify(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decodes for ``model.generate(..., custom_generate=draft_verify)`` with a
    :class:`SpeculativeKVCache`.

    The model drafts some tokens on the cache's compressed face, reads them at once on the exact
    one, keeps those that it would have said itself, and adds one of its own. Greedy tokens are
    those of plain ``generate`` (in fp32; in bf16 where two logits are not within rounding), sampled
    ones are distributed as there. Streamers, stopping criteria, logits processors,
    ``output_scores`` and ``output_logits`` work as usual; ``prompt_lookup_num_tokens=`` and
    ``assistant_model=`` make proposals to the draft face. Rows of a batch are decoded
    one after the other.

    With a :class:`ChunkReuseCache` made with ``verify=True`` one draft is made on moved text
    instead, before the exact prefill: see :class:`VerifiedReuse`.

    Raises:
        ValueError: another cache, an encoder-decoder model, beams, or outputs that are not kept
            (attentions, hidden states).
    """
    assert generation_config is not None
    cache = model_kwargs.get(CACHE_ARGUMENT)
    _check(model, cache, generation_config)
    given = generate_arguments("streamer", "assistant_model")
    streamer = streamer or given["streamer"]
    if isinstance(cache, ChunkReuseCache):
        _check_no_proposals(given["assistant_model"], generation_config)
        return VerifiedReuse(
            model,
            cache,
            model_kwargs,
            generation_config,
            LogitsProcessorList() if logits_processor is None else logits_processor,
            StoppingCriteriaList() if stopping_criteria is None else stopping_criteria,
            streamer,
        ).run(input_ids)
    assert isinstance(cache, SpeculativeKVCache)
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(
            f"streamer: expected one row, got {input_ids.shape[0]}: rows are decoded one after the "
            "other; stream them in calls of their own"
        )
    options = _Options(
        config=generation_config,
        processor=LogitsProcessorList() if logits_processor is None else logits_processor,
        criteria=StoppingCriteriaList() if stopping_criteria is None else stopping_criteria,
        streamer=streamer,
        assistant_model=given["assistant_model"],
    )
    cache.decoding = True
    try:
        out = _decode(model, cache, input_ids, model_kwargs, options)
    finally:
        cache.end_draft()
        cache.decoding = False
    if streamer is not None:
        streamer.end()
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What ``generate`` prepared, the same for every row."""

    config: GenerationConfig
    processor: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: Any
    assistant_model: Any


def _check(model: Any, cache: Any, config: GenerationConfig) -> None:
    if isinstance(cache, ChunkReuseCache) and not cache.verify:
        raise ValueError(
            "draft_verify: expected ChunkReuseCache(..., verify=True), got one with verify=False"
        )
    if not isinstance(cache, SpeculativeKVCache | ChunkReuseCache):
        raise ValueError(
            f"draft_verify: expected a SpeculativeKVCache, got {type(cache).__name__}; pass "
            f"generate({CACHE_ARGUMENT}=SpeculativeKVCache(), custom_generate=draft_verify)"
        )
    if model.config.is_encoder_decoder:
        raise ValueError("draft_verify: expected a decoder-only model, got an encoder-decoder one")
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams: expected 1 under draft_verify, got {config.num_beams}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name}: not kept under draft_verify; leave it out")


def _check_no_proposals(assistant_model: Any, config: GenerationConfig) -> None:
    if assistant_model is not None or config.prompt_lookup_num_tokens is not None:
        raise ValueError(
            "assistant_model, prompt_lookup_num_tokens: nothing to propose to under "
            "ChunkReuseCache(verify=True), which drafts once and then decodes plainly; leave out"
        )


def _decode(
    model: Any,
    cache: SpeculativeKVCache,
    ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    options: _Options,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    began, moved = time.perf_counter(), cache.faces.bytes_read
    outputs = model._prefill(ids, options.config, model_kwargs)
    first = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=ids.device)
    del outputs  # its logits may be large
    report = DraftVerifyReport(
        prefill_seconds=time.perf_counter() - began, bytes_moved=cache.faces.bytes_read - moved
    )
    if ids.shape[0] == 1:
        rows = [_row(model, cache, ids, model_kwargs, options)]
    else:
        caches = [cache.row(index) for index in range(ids.shape[0])]
        rows = [
            _row(model, row, ids[[index]], _row_of(model_kwargs, index, ids.shape[0]), options)
            for index, row in enumerate(caches)
        ]
    for index, row in enumerate(rows):
        before = row.cache.faces.bytes_read
        row.run(first[[index]])
        row.report.bytes_moved = row.cache.faces.bytes_read - before
        measure(row.cache, row.report)
        report.add(row.report)
    tokens = max(row.ids.shape[1] for row in rows)
    if len(rows) > 1:
        for row in rows:
            row.cache.end_draft()
            row.pad_to(tokens, int(options.config._pad_token_tensor or 0))
        cache.join([row.cache for row in rows])
    cache.last_report = report
    return _output(rows, cache, options.config)


def _row(
    model: Any,
    cache: SpeculativeKVCache,
    ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    options: _Options,
) -> RowDecoder:
    config = options.config
    inputs = RowInputs(model, cache, model_kwargs, ids.shape[1])
    cache.faces.begin_row(inputs.padding)
    return RowDecoder(
        inputs,
        ids,
        options.processor,
        options.criteria,
        sample=bool(config.do_sample),
        max_length=int(config.max_length),
        eos_token_ids=_eos(config),
        streamer=options.streamer,
        proposer=_proposer(model, inputs.padding, options),
        keep_scores=bool(config.return_dict_in_generate and config.output_scores),
        keep_logits=bool(config.return_dict_in_generate and config.output_logits),
    )


def _row_of(model_kwargs: dict[str, Any], index: int, batch: int) -> dict[str, Any]:
    """What belongs to one row: tensors with the batch in front are cut."""
    return {
        name: value[[index]]
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == batch
        else value
        for name, value in model_kwargs.items()
    }


def _proposer(model: Any, padding: int, options: _Options) -> CandidateGenerator | None:
    """Prompt lookup or an assistant model, where ``generate`` was asked for one."""
    config = options.config
    if options.assistant_model is not None:
        vocab_size = model.config.get_text_config().vocab_size
        return AssistantProposer(options.assistant_model, vocab_size, padding=padding)
    if config.prompt_lookup_num_tokens is None:
        return None
    return PromptLookupCandidateGenerator(
        eos_token_id=config._eos_token_tensor,
        num_output_tokens=config.prompt_lookup_num_tokens,
        max_matching_ngram_size=config.max_matching_ngram_size or 2,
        max_length=config.max_length,
        vocab_size=model.config.get_text_config().vocab_size,
    )


def _eos(config: GenerationConfig) -> set[int]:
    tokens = getattr(config, "_eos_token_tensor", None)
    return set() if tokens is None else set(tokens.flatten().tolist())


def measure(cache: SpeculativeKVCache, report: DraftVerifyReport) -> None:
    """Notes the bytes that the faces of ``cache`` take now."""
    report.draft_bytes, report.full_bytes, report.dense_bytes = cache.face_bytes()
    report.staging_bytes = cache.faces.held_staging_bytes


def _output(
    rows: list[RowDecoder], cache: SpeculativeKVCache, config: GenerationConfig
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    sequences: Any = torch.cat([row.ids for row in rows])
    if not config.return_dict_in_generate:
        return cast(torch.Tensor, sequences)
    collected: dict[str, Any] = {CACHE_ARGUMENT: cache}
    for name in ("scores", "logits"):
        by_row = [getattr(row, name) for row in rows]
        if by_row[0] is not None:
            collected[name] = tuple(torch.cat(step) for step in zip(*by_row, strict=True))
    return GenerateDecoderOnlyOutput(sequences=sequences, **collected)
