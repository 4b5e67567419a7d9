"""draft_verify says what plain generate says, whatever the draft face has lost."""

from __future__ import annotations

import copy
from functools import partial
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.streamers import BaseStreamer

from hf_kvcodecs import CacheMisuseError, SpeculativeKVCache, disable, draft_verify, enable
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.compressors import (
    KIVI,
    Compressor,
    Dropper,
    KVzip,
    SnapKV,
    StreamingLLM,
)
from hf_kvcodecs.generation import candidate_generator, draft_step
from hf_kvcodecs.generation.candidate_generator import Draft, SameModelCandidateGenerator
from hf_kvcodecs.store.streaming import StagedStream

from ..caches.test_generate import tiny_gemma
from ..harness import assert_same_bits, forward, generate, prompt, tiny_llama

pytestmark = pytest.mark.compat

IDENTITY = Compressor()
LOSSY = [
    {"compressor": "streaming_llm", "keep": 0.5},
    {"compressor": "knorm", "keep": 0.5},
    {"compressor": "snapkv", "keep": 0.5},
    {"compressor": "tova", "keep": 0.5},
    {"compressor": "expected_attention", "keep": 0.5},
    {"compressor": "kvzip", "keep": 0.5},
    {"compressor": "kivi", "bits": 8},
    {"compressor": "kivi", "bits": 2},
    {"compressor": "rotate", "bits": 4},
    {"compressor": "snapkv+rotate", "keep": 0.7, "bits": 4},
    {"compressor": "kvzip", "keep": 0.7, "bits": 4},
    {
        "compressor": Compressor(
            dropper=Dropper(scorer=SnapKV(), keep=0.5, budget="heads"), quantiser=KIVI(bits=3)
        )
    },
]


def name_of(options: dict) -> str:
    compressor = options["compressor"]
    name = compressor if isinstance(compressor, str) else "adakv"
    return "-".join([name, *(str(v) for k, v in options.items() if k != "compressor")])


def drafted(model, ids, cache, **options):
    return generate(model, ids, cache, custom_generate=draft_verify, **options)


@pytest.fixture
def model(tiny_models):
    return tiny_models[torch.float32]


@pytest.mark.parametrize("options", LOSSY, ids=name_of)
def test_greedy_tokens_are_those_of_plain_generate(model, options):
    ids = prompt(90)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=60)
    cache = SpeculativeKVCache(**options, draft_length=6, refresh_tokens=20)
    assert torch.equal(drafted(model, ids, cache, max_new_tokens=60), plain)
    report = cache.report()
    assert report.tokens == 60
    assert report.rounds > 5
    assert report.drafted == sum(report.drafted_by_round) >= report.accepted >= 0
    assert cache.get_seq_length() == 90 + 59


@pytest.mark.parametrize("draft_length", [1, 2, 3, 7, 25, 40, "auto"])
def test_any_draft_length(model, draft_length):
    ids = prompt(40)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=45)
    cache = SpeculativeKVCache(compressor="kivi", bits=8, draft_length=draft_length)
    assert torch.equal(drafted(model, ids, cache, max_new_tokens=45), plain)
    if draft_length != "auto":
        assert max(cache.report().drafted_by_round) == min(draft_length, 43)


def test_an_exact_draft_face_has_every_draft_accepted(model):
    ids = prompt(40)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=50)
    cache = SpeculativeKVCache(compressor=IDENTITY, draft_length=6)
    assert torch.equal(drafted(model, ids, cache, max_new_tokens=50), plain)
    report = cache.report()
    assert report.acceptance_rate == 1
    assert report.drafted_by_round[:-1] == [6] * (report.rounds - 1)
    assert report.rounds == 7


def test_wrong_drafts_are_all_rejected(model, monkeypatch):
    right = SameModelCandidateGenerator.draft

    def wrong(self, ids):
        draft = right(self, ids)
        return Draft((draft.tokens + 1) % 101, draft.probabilities, draft.scores)

    monkeypatch.setattr(SameModelCandidateGenerator, "draft", wrong)
    ids = prompt(40)
    plain = generate(model, ids, DynamicCache())
    cache = SpeculativeKVCache(compressor=IDENTITY, draft_length=4)
    assert torch.equal(drafted(model, ids, cache), plain)
    assert cache.report().accepted == 0
    assert cache.get_seq_length() == 40 + 39


@pytest.mark.parametrize("place", [0, 1, 3, 9, 10, 11])
def test_the_end_inside_a_draft(model, place):
    ids = prompt(40)
    endless = generate(model, ids, DynamicCache())[0, 40:].tolist()
    eos = next(token for token in endless[place:] if token not in endless[:place])
    plain = generate(model, ids, DynamicCache(), eos_token_id=eos, pad_token_id=0)
    cache = SpeculativeKVCache(compressor=IDENTITY, draft_length=10)
    out = drafted(model, ids, cache, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(out, plain)
    assert out[0, -1] == eos
    assert cache.get_seq_length() == out.shape[1] - 1


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9])
def test_fewer_tokens_than_a_draft(model, new_tokens):
    ids = prompt(40)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=new_tokens)
    cache = SpeculativeKVCache(compressor=IDENTITY, draft_length=25)
    assert torch.equal(drafted(model, ids, cache, max_new_tokens=new_tokens), plain)
    assert cache.get_seq_length() == 40 + new_tokens - 1
    assert cache.report().drafted <= max(new_tokens - 2, 0)


class Penalty(LogitsProcessor):
    """Looks at the text before each token: wrong prefixes would change the tokens."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[0, -7:]] -= 5
        return scores


def test_scores_logits_and_processors(model):
    ids = prompt(50)
    options = {
        "repetition_penalty": 1.3,
        "min_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    plain = generate(
        model, ids, DynamicCache(), logits_processor=LogitsProcessorList([Penalty()]), **options
    )
    cache = SpeculativeKVCache(compressor="kivi", bits=4, draft_length=5)
    out = drafted(model, ids, cache, logits_processor=LogitsProcessorList([Penalty()]), **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(out.scores) == len(out.logits) == 40
    for ours, theirs in zip(
        [*out.scores, *out.logits], [*plain.scores, *plain.logits], strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert out[CACHE_ARGUMENT] is cache


class Collecting(BaseStreamer):
    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_a_streamer_gets_each_token_once(model):
    ids = prompt(30)
    plain, ours = Collecting(), Collecting()
    generate(model, ids, DynamicCache(), streamer=plain)
    drafted(model, ids, SpeculativeKVCache(compressor=IDENTITY, draft_length=7), streamer=ours)
    assert ours.given == plain.given
    assert ours.ended


def test_a_stopping_criterion_sees_every_token(model):
    ids = prompt(30)
    seen: list[int] = []

    def stop(input_ids, scores, **kwargs):
        seen.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == 43)

    cache = SpeculativeKVCache(compressor=IDENTITY, draft_length=8)
    out = drafted(model, ids, cache, stopping_criteria=[stop])
    assert out.shape[1] == 43
    assert seen == list(range(31, 44))
    assert cache.get_seq_length() == 42


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": [5, 6, 7, 8, 9, 33, 40], "pad_token_id": 0}])
@pytest.mark.parametrize("compressor", ["kvzip", "snapkv"])
def test_rows_of_a_batch_go_their_own_ways(model, ends, compressor):
    ids = prompt(50, batch=3)
    ids[0, :10] = 0
    ids[2, :20] = 0
    kept = {"return_dict_in_generate": True, "output_logits": True}
    plain = generate(model, ids, DynamicCache(), **ends, **kept)
    cache = SpeculativeKVCache(
        compressor=compressor, keep=0.7, bits=8, draft_length=5, refresh_tokens=16
    )
    out = drafted(model, ids, cache, **ends, **kept)
    assert torch.equal(out.sequences, plain.sequences)
    torch.testing.assert_close(
        torch.stack(out.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4
    )
    assert cache.report().tokens <= 3 * len(plain.logits)
    # The cache can go on as plain generate's can.
    more = torch.cat([plain.sequences, prompt(7, batch=3, seed=5)], dim=1)
    mask = torch.cat([(ids != 0).long(), torch.ones_like(more[:, 50:])], dim=1)
    dynamic = plain[CACHE_ARGUMENT]
    again = generate(model, more, dynamic, attention_mask=mask, max_new_tokens=9)
    ours = drafted(model, more, cache, attention_mask=mask, max_new_tokens=9)
    assert torch.equal(ours, again)


@pytest.mark.parametrize("compressor", ["snapkv", "kvzip", "kivi"])
def test_several_turns_on_one_cache(model, compressor):
    cache, dynamic = SpeculativeKVCache(compressor=compressor, draft_length=4), DynamicCache()
    text = prompt(30)
    for turn in range(3):
        plain = generate(model, text, dynamic, max_new_tokens=15)
        before = cache.faces.bytes_read
        assert torch.equal(drafted(model, text, cache, max_new_tokens=15), plain)
        assert cache.faces.bytes_read > before
        assert cache.get_seq_length() == plain.shape[1] - 1
        text = torch.cat([plain, prompt(10, seed=turn + 7)], dim=1)


def test_a_prompt_that_was_read_before(model):
    ids = prompt(60)
    plain = generate(model, ids, DynamicCache())
    cache = SpeculativeKVCache(compressor="snapkv", keep=0.5)
    forward(model, ids[:, :25], cache)
    forward(model, ids[:, 25:59], cache)
    assert torch.equal(drafted(model, ids, cache), plain)


@pytest.mark.parametrize("full", [{}, {"full": "disk"}, {"full_codec": "gaac"}], ids=str)
def test_a_prompt_that_was_read_under_inference_mode(model, full):
    """Memory made there can be written outside of it, and the other way round."""
    ids = prompt(400)
    plain = generate(model, ids, DynamicCache())
    cache = SpeculativeKVCache(compressor="snapkv", keep=0.5, draft_length=5, **full)
    with torch.inference_mode():
        model(ids[:, :300], **{CACHE_ARGUMENT: cache})
        cache.begin_draft()
        model(ids[:, 300:303], **{CACHE_ARGUMENT: cache})
        cache.end_draft()
    assert torch.equal(drafted(model, ids, cache), plain)
    with torch.inference_mode():
        more = torch.cat([plain, prompt(5, seed=3)], dim=1)
        assert drafted(model, more, cache).shape[1] == more.shape[1] + 40


def test_a_prompt_read_in_pieces(model):
    ids = prompt(60)
    plain = generate(model, ids, DynamicCache())
    cache = SpeculativeKVCache(compressor="snapkv", keep=0.5)
    assert torch.equal(drafted(model, ids, cache, prefill_chunk_size=16), plain)
    assert cache.own_layers[0].queries.shape[2] == 64


@pytest.mark.parametrize(
    "how", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": "smaller"}], ids=str
)
def test_proposals_to_the_draft_face(model, how):
    if "assistant_model" in how:
        how = {"assistant_model": tiny_llama(num_hidden_layers=2)}
    ids = prompt(20).repeat(1, 3)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=60)
    alone = SpeculativeKVCache(compressor="kivi", bits=4, draft_length=9)
    together = SpeculativeKVCache(compressor="kivi", bits=4, draft_length=9)
    assert torch.equal(drafted(model, ids, alone, max_new_tokens=60), plain)
    assert torch.equal(drafted(model, ids, together, max_new_tokens=60, **how), plain)
    # Proposals change how many forwards a draft takes, not what it says.
    assert together.report().accepted_by_round == alone.report().accepted_by_round


def test_an_assistant_that_is_the_model_saves_forwards(model):
    ids, calls = prompt(30), []
    cache = SpeculativeKVCache(compressor=IDENTITY, draft_length=9)
    assistant = copy.deepcopy(model)
    handle = model.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        out = drafted(model, ids, cache, assistant_model=assistant)
    finally:
        handle.remove()
    assert torch.equal(out, generate(model, ids, DynamicCache()))
    assert len(calls) == 1 + 4 * 2  # the prompt; rounds of nine drafts: one forward, and one more


def test_another_vocabulary_is_refused(model):
    cache = SpeculativeKVCache()
    with pytest.raises(ValueError, match="expected the same vocabulary"):
        drafted(model, prompt(20), cache, assistant_model=tiny_llama(vocab_size=103))


@pytest.mark.parametrize(
    "compressor", ["snapkv", "kvzip", IDENTITY], ids=["snapkv", "kvzip", "exact"]
)
def test_sliding_layers_are_rolled_back(compressor):
    model = tiny_gemma()
    ids = prompt(40)
    plain = generate(model, ids, DynamicCache(config=model.config))
    cache = SpeculativeKVCache(model.config, compressor=compressor, draft_length=5)
    assert torch.equal(drafted(model, ids, cache), plain)
    assert cache.get_seq_length() == 79


@pytest.mark.parametrize(
    "options",
    [{"compressor": "snapkv", "keep": 0.5}, {"compressor": "kvzip", "keep": 0.5, "bits": 8}],
    ids=name_of,
)
@pytest.mark.parametrize("hold_decoded", [False, True])
def test_steps_of_fixed_shape(model, options, hold_decoded):
    """What a GPU captures as a graph, run as it is: the same drafts, token for token."""
    ids = prompt(150)
    ids[0, :13] = 0
    plain = generate(model, ids, DynamicCache(), max_new_tokens=60)
    accepted = []
    for graphs in (False, True):
        cache = SpeculativeKVCache(
            **options,
            draft_length=6,
            refresh_tokens=20,
            hold_decoded=hold_decoded,
            graphs=graphs,
        )
        assert torch.equal(drafted(model, ids, cache, max_new_tokens=60), plain)
        accepted.append(cache.report().accepted_by_round)
        assert cache.drafts_statically == graphs
    assert accepted[0] == accepted[1]
    assert sum(accepted[0]) > 5


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"keep": 0.7, "bits": 4}], ids=str)
def test_compiled_steps_are_one_graph_for_every_text(model, options, monkeypatch):
    """Dynamo traces the model once (fullgraph), and it drafts what the model drafts."""
    monkeypatch.setattr(draft_step.torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(draft_step, "_compiled_steps", WeakKeyDictionary())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for tokens in (90, 140):
        ids, accepted = prompt(tokens), []
        plain = generate(model, ids, DynamicCache(), max_new_tokens=40)
        for compiled in (False, True):
            cache = SpeculativeKVCache(
                compressor="kvzip", graphs=True, compile_drafts=compiled, draft_length=5,
                refresh_tokens=20, **options,
            )  # fmt: skip
            out = generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=40)
            assert torch.equal(out, plain)
            accepted.append(cache.report().accepted)
        assert accepted[0] == accepted[1] > 0
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_step_that_cannot_be_compiled_runs_as_it_is(model, monkeypatch):
    def failing(graph, inputs):
        raise RuntimeError("no compiler here")

    notices: list[str] = []
    monkeypatch.setattr(draft_step, "notice_once", notices.append)
    monkeypatch.setattr(draft_step.torch, "compile", partial(torch.compile, backend=failing))
    monkeypatch.setattr(draft_step, "_compiled_steps", WeakKeyDictionary())
    torch._dynamo.reset()
    ids = prompt(90)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=20)
    for _ in range(2):
        cache = SpeculativeKVCache(graphs=True, compile_drafts=True, draft_length=5)
        out = generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=20)
        assert torch.equal(out, plain)
    assert len(notices) == 1
    assert "could not be compiled" in notices[0]


def test_steps_that_are_not_compiled_are_told_of(model, monkeypatch):
    notices: set[str] = set()
    monkeypatch.setattr(candidate_generator, "notice_once", notices.add)
    cache = SpeculativeKVCache(compressor="reselect", keep=0.5, graphs=True, compile_drafts=True)
    generate(model, prompt(60), cache, custom_generate=draft_verify, max_new_tokens=5)
    assert len(notices) == 1
    assert "fixed shape" in notices.pop()


def test_layers_streamed_through_a_staging_ring(model):
    ids = prompt(60)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=50)
    for staging_bytes in (None, 10**9):
        cache = SpeculativeKVCache(compressor="snapkv", keep=0.5, draft_length=5, refresh_tokens=16)
        device = torch.device("cpu")
        stream = StagedStream(cache.faces.store, device, staging_bytes)
        cache.faces.streams[device] = stream
        assert torch.equal(drafted(model, ids, cache, max_new_tokens=50), plain)
        slots = 2 if staging_bytes is None else 3
        assert len({**stream._slots}) + len(stream._free) == slots
        assert cache.report().bytes_moved > 10 * 60 * cache.report().dense_bytes // 110


def test_enable_and_disable(model):
    ids = prompt(30)
    model = copy.deepcopy(model)
    assert enable(enable(model)) is model
    cache = SpeculativeKVCache(compressor=IDENTITY)
    out = generate(model, ids, cache)
    assert cache.report().rounds
    assert torch.equal(out, generate(model, ids, DynamicCache()))
    assert disable(disable(model)) is model
    assert "generate" not in vars(model)


def test_refusals(model):
    ids = prompt(30)
    with pytest.raises(ValueError, match="expected a SpeculativeKVCache, got DynamicCache"):
        drafted(model, ids, DynamicCache())
    with pytest.raises(ValueError, match="num_beams: expected 1"):
        drafted(model, ids, SpeculativeKVCache(), num_beams=2)
    with pytest.raises(ValueError, match="streamer: expected one row"):
        drafted(model, prompt(30, batch=2), SpeculativeKVCache(), streamer=Collecting())
    cache = SpeculativeKVCache()
    drafted(model, ids, cache)
    with pytest.raises(CacheMisuseError, match="nothing new to read"):
        drafted(model, ids, cache)


def test_kvzip_needs_the_whole_text(model):
    cache = SpeculativeKVCache(compressor="kvzip")
    forward(model, prompt(30), cache)
    with pytest.raises(ValueError, match="expected all 34 tokens"):
        drafted(model, prompt(4), cache, attention_mask=torch.ones(1, 34, dtype=torch.long))


def test_kvzip_leaves_the_exact_face_alone(model):
    ids = prompt(40)
    cache, dynamic = SpeculativeKVCache(compressor="kvzip", keep=0.5), DynamicCache()
    drafted(model, ids, cache, max_new_tokens=1)
    drafted(model, ids, dynamic_cache := SpeculativeKVCache(), max_new_tokens=1)
    forward(model, ids, dynamic)
    for idx in range(3):
        for ours, theirs in zip(cache.dense(idx), dynamic_cache.dense(idx), strict=True):
            assert_same_bits(ours, theirs)


def test_budgets_shared_by_the_model_differ_by_head(model):
    ids = prompt(200)
    dropper = Dropper(scorer=KVzip(chunk_tokens=64), keep=0.3, budget="model", recent_tokens=8)
    cache = SpeculativeKVCache(compressor=Compressor(dropper=dropper), draft_length=4)
    plain = generate(model, ids, DynamicCache(), max_new_tokens=8)
    assert torch.equal(drafted(model, ids, cache, max_new_tokens=8), plain)
    counts = [count for layer in cache.own_layers for count in layer.draft.counts]
    assert sum(counts) == 6 * 60
    assert len(set(counts)) > 1


def test_streaming_llm_keeps_sinks_and_the_newest(model):
    dropper = Dropper(scorer=StreamingLLM(), keep=0.1, sink_tokens=4)
    cache = SpeculativeKVCache(compressor=Compressor(dropper=dropper))
    ids = prompt(100)
    forward(model, ids, cache)
    cache.compress()
    keys, _ = cache.dense(1)
    kept = torch.cat([keys[0, :, :4], keys[0, :, 94:]], dim=1)
    draft = cache.own_layers[1].draft
    for head, start in enumerate(draft.starts):
        assert_same_bits(draft.keys[start : start + 10], kept[head])
