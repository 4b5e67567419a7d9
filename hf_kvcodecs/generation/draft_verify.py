"""``draft_verify``: what plain ``generate`` says, drafted on the compressed face of the cache."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..caches.compat import CACHE_ARGUMENT, generate_arguments
from ..caches.speculative import SpeculativeKVCache
from ..caches.speculative_report import DraftVerifyReport
from .inputs import RowInputs
from .row import RowDecoder


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
    ones are distributed as there. Streamers, stopping criteria, logits processors, ``output_scores``
    and ``output_logits`` work as usual; ``prompt_lookup_num_tokens=`` and ``assistant_model=`` make
    proposals to the draft face. Rows of a batch are decoded one after the other.

    Raises:
        ValueError: another cache, an encoder-decoder model, beams, or outputs that are not kept
            (attentions, hidden states).
    """
    assert generation_config is not None
    cache = model_kwargs.get(CACHE_ARGUMENT)
    _check(model, cache, generation_config)
    assert isinstance(cache, SpeculativeKVCache)
    given = generate_arguments("streamer", "assistant_model")
    streamer = streamer or given["streamer"]
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(
            f"streamer: expected one row, got {input_ids.shape[0]}: rows are decoded one after the "
            "other; stream them in calls of their own"
        )
    cache.decoding = True
    try:
        return _decode(
            model,
            cache,
            input_ids,
            logits_processor or LogitsProcessorList(),
            stopping_criteria or StoppingCriteriaList(),
            generation_config,
            streamer,
            model_kwargs,
        )
    finally:
        cache.end_draft()
        cache.decoding = False


def _check(model: Any, cache: Any, config: GenerationConfig) -> None:
    if not isinstance(cache, SpeculativeKVCache):
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


def _decode(
    model: Any,
    cache: SpeculativeKVCache,
    ids: torch.Tensor,
    processor: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    began, moved = time.perf_counter(), cache.faces.bytes_read
    report = DraftVerifyReport()
    outputs = model._prefill(ids, config, model_kwargs)
    first = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=ids.device)
    del outputs
    report.prefill_seconds = time.perf_counter() - began
    wanted = config.return_dict_in_generate
    decoder = RowDecoder(
        RowInputs(model, cache, model_kwargs, ids.shape[1]),
        ids,
        processor,
        criteria,
        sample=config.do_sample,
        max_length=config.max_length,
        eos_token_ids=_eos(config),
        streamer=streamer,
        keep_scores=bool(wanted and config.output_scores),
        keep_logits=bool(wanted and config.output_logits),
    )
    cache.faces.padding = decoder.inputs.padding
    decoder.run(first)
    if streamer is not None:
        streamer.end()
    report.add(decoder.report)
    report.bytes_moved = cache.faces.bytes_read - moved
    cache.last_report = report
    if not wanted:
        return decoder.ids
    return GenerateDecoderOnlyOutput(
        sequences=decoder.ids,
        scores=None if decoder.scores is None else tuple(decoder.scores),
        logits=None if decoder.logits is None else tuple(decoder.logits),
        **{CACHE_ARGUMENT: cache},
    )


def _eos(config: GenerationConfig) -> set[int]:
    tokens = getattr(config, "_eos_token_tensor", None)
    return set() if tokens is None else set(tokens.flatten().tolist())
