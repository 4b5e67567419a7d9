"""ChunkReuseCache(verify=True): early tokens are provisional, the text is full recomputation's."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList

from hf_kvcodecs import ChunkReuseCache, ChunkStore, draft_verify, enable
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT

from ..caches.test_chunk_reuse import DOCUMENT, seen, text
from ..harness import assert_same_bits, forward, generate, prompt, tiny_llama
from .test_draft_verify import Collecting, Penalty, drafted
from .test_sampling import chi_square_z, processed

pytestmark = pytest.mark.compat

MOVED = text(33, DOCUMENT, 12)
KEPT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture
def model(tiny_models):
    return tiny_models[torch.float32]


def store_of(model, **options: object) -> ChunkStore:
    return seen(model, text(10, DOCUMENT, 9), **options)


def assert_same_states(cache, expected) -> None:
    """Every layer's bits, up to rounding behind the prompt."""
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values, other.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("repair", ["none", "selective", "cacheblend"])
@pytest.mark.parametrize("draft_length", [1, 2, 7, 16, 60])
def test_greedy_tokens_are_those_of_plain_generate(model, repair, draft_length):
    plain, provisional = DynamicCache(), []
    expected = generate(model, MOVED, plain)
    cache = ChunkReuseCache(
        model,
        store_of(model),
        repair=repair,
        verify=True,
        draft_length=draft_length,
        on_provisional=provisional.append,
    )
    assert torch.equal(drafted(model, MOVED, cache), expected)
    report = cache.report()
    assert [t.shape[1] for t in provisional] == list(range(1, min(draft_length, 40) + 1))
    assert report.provisional_tokens == len(provisional)
    right = (provisional[-1][0] == expected[0, 245 : 245 + len(provisional)]).long()
    assert report.accepted_tokens == int(right.cumprod(0).sum())
    assert report.moved_tokens == 200
    assert 0 < report.provisional_seconds < report.verified_seconds
    assert f"{report.accepted_tokens} of {len(provisional)} provisional" in str(report)
    assert cache.get_seq_length() == 245 + 39
    assert_same_states(cache, plain)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_prompt_and_store_have_the_bits_of_plain_prefill(model, codec):
    """Also where the store is lossy: then not even the beginning of a prompt is taken from it."""
    plain, store = DynamicCache(), store_of(model, codec=codec)
    expected = generate(model, MOVED, plain, **KEPT)
    cache = ChunkReuseCache(model, store, verify=True)
    out = drafted(model, MOVED, cache, **KEPT)
    assert cache.report().accepted_tokens > 0
    assert_same_bits(out.logits[0], expected.logits[0])
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert_same_bits(layer.keys[:, :, :245], other.keys[:, :, :245])
        assert_same_bits(layer.values[:, :, :245], other.values[:, :, :245])
    del cache, out, layer
    gc.collect()
    again = ChunkReuseCache(model, store, verify=True)
    assert torch.equal(drafted(model, MOVED, again), expected.sequences)
    if codec is None:  # the whole text is the beginning of one seen now
        assert (again.report().exact_tokens, again.report().provisional_tokens) == (244, 0)
        assert_same_bits(again.layers[0].keys[:, :, :244], plain.layers[0].keys[:, :, :244])
    else:
        assert again.report().provisional_tokens == 16


@pytest.mark.parametrize("place", [0, 1, 3, 15, 16])
def test_the_end_inside_provisional_tokens(model, place):
    endless = generate(model, MOVED, DynamicCache())[0, 245:].tolist()
    eos = next(token for token in endless[place:] if token not in endless[:place])
    ends = {"eos_token_id": eos, "pad_token_id": 0}
    plain = generate(model, MOVED, DynamicCache(), **ends)
    cache = ChunkReuseCache(model, store_of(model), verify=True)
    assert torch.equal(drafted(model, MOVED, cache, **ends), plain)
    assert cache.get_seq_length() == plain.shape[1] - 1


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9, 16, 17])
def test_fewer_tokens_than_a_draft(model, new_tokens):
    plain = generate(model, MOVED, DynamicCache(), max_new_tokens=new_tokens)
    cache = ChunkReuseCache(model, store_of(model), verify=True)
    assert torch.equal(drafted(model, MOVED, cache, max_new_tokens=new_tokens), plain)
    assert cache.report().provisional_tokens == min(new_tokens, 16)
    assert cache.get_seq_length() == 245 + new_tokens - 1


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": [5, 6, 7, 8, 9, 33, 40], "pad_token_id": 0}])
@pytest.mark.parametrize("pieces", [{}, {"prefill_chunk_size": 150}], ids=["whole", "pieces"])
def test_batches_with_padding_and_turns(model, ends, pieces):
    rows = [text(33, DOCUMENT, 12), text(5, DOCUMENT, 9), prompt(220, seed=9)]
    ids = torch.cat([torch.nn.functional.pad(row, (245 - row.shape[1], 0)) for row in rows])
    plain = generate(model, ids, dynamic := DynamicCache(), **ends, **KEPT)
    found: list[torch.Tensor] = []
    cache = ChunkReuseCache(model, store_of(model), verify=True, on_provisional=found.append)
    out = drafted(model, ids, cache, **ends, **KEPT, **pieces)
    assert torch.equal(out.sequences, plain.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(out[name]), torch.stack(plain[name]), atol=1e-4, rtol=1e-4
        )
    assert out[CACHE_ARGUMENT] is cache
    assert found[-1].shape[0] == 3
    assert cache.report().accepted_tokens > 0
    for turn in range(2):
        ids = torch.cat([plain.sequences, prompt(7, batch=3, seed=5 + turn)], dim=1)
        mask = torch.ones_like(ids)
        mask[:, :245] = (plain.sequences[:, :245] != 0).long()
        plain = generate(model, ids, dynamic, attention_mask=mask, **KEPT)
        ours = drafted(model, ids, cache, attention_mask=mask, **KEPT)
        assert torch.equal(ours.sequences, plain.sequences)


def test_a_streamer_gets_verified_tokens_only(model):
    store = store_of(model)
    plain, ours, provisional = Collecting(), Collecting(), []
    generate(model, MOVED, DynamicCache(), streamer=plain)
    before: list[int] = []

    def early(tokens):
        provisional.append(tokens)
        before.append(len(ours.given))

    cache = ChunkReuseCache(model, store, repair="none", verify=True, on_provisional=early)
    drafted(model, MOVED, cache, streamer=ours)
    assert ours.given == plain.given
    assert ours.ended
    assert before == [1] * 16  # the prompt alone


def test_processors_see_the_text_so_far(model):
    options = {"repetition_penalty": 1.3, "min_new_tokens": 12, **KEPT}
    processor = LogitsProcessorList([Penalty()])
    plain = generate(model, MOVED, DynamicCache(), logits_processor=processor, **options)
    cache = ChunkReuseCache(model, store_of(model), verify=True)
    out = drafted(model, MOVED, cache, logits_processor=processor, **options)
    assert torch.equal(out.sequences, plain.sequences)
    torch.testing.assert_close(torch.cat(out.scores), torch.cat(plain.scores), atol=1e-4, rtol=1e-4)


def turn_wrongly(self, keys, *angles_and_out):
    angles_and_out[-1].copy_(keys.flip(-1) * 3)


def test_wrong_drafts_are_rejected(model, monkeypatch):
    """However wrong the numbers that moved are."""
    store = store_of(model)
    plain = generate(model, MOVED, DynamicCache())
    cache = ChunkReuseCache(model, store, repair="none", verify=True)
    monkeypatch.setattr(type(cache.rotation), "turn", turn_wrongly)
    assert torch.equal(drafted(model, MOVED, cache), plain)
    assert cache.report().accepted_tokens < 16


def test_a_callback_that_fails_leaves_nothing_behind(model):
    store = store_of(model)
    held = store.stats().bytes

    def fail(tokens):
        raise KeyError("no")

    cache = ChunkReuseCache(model, store, verify=True, on_provisional=fail)
    with pytest.raises(KeyError):
        drafted(model, MOVED, cache)
    assert cache.get_seq_length() == 0
    assert not cache.decoding
    assert not cache.drafting
    cache.flush()
    assert store.stats().bytes == held
    cache.on_provisional = None
    assert torch.equal(drafted(model, MOVED, cache), generate(model, MOVED, DynamicCache()))


def test_without_the_decoder_it_is_exact_and_says_so(model, caplog):
    from transformers.utils import logging

    logging.get_logger("transformers").warning_once.__func__.cache_clear()
    plain = generate(model, MOVED, DynamicCache(), **KEPT)
    for codec in (None, "int8"):
        cache = ChunkReuseCache(model, store_of(model, codec=codec), verify=True)
        out = generate(model, MOVED, cache, **KEPT)
        assert cache.report().moved_tokens == 0
        assert_same_bits(torch.cat(out.logits), torch.cat(plain.logits))
    assert caplog.text.count("custom_generate=draft_verify") == 1


def test_enable_chooses_the_decoder(model):
    model = enable(copy.deepcopy(model))
    store = store_of(model)
    cache = ChunkReuseCache(model, store, verify=True)
    out = generate(model, MOVED, cache)
    assert cache.report().provisional_tokens == 16
    unverified = ChunkReuseCache(model, store)
    assert torch.equal(out, generate(model, MOVED, DynamicCache()))
    generate(model, MOVED, unverified)
    assert unverified.report().provisional_tokens == 0


def test_refusals(model):
    store = ChunkStore()
    with pytest.raises(ValueError, match=r"expected ChunkReuseCache\(.*verify=True"):
        drafted(model, MOVED, ChunkReuseCache(model, store))
    cache = ChunkReuseCache(model, store, verify=True)
    with pytest.raises(ValueError, match="num_beams: expected 1"):
        drafted(model, MOVED, cache, num_beams=2)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: nothing to propose to"):
        drafted(model, MOVED, cache, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="draft_length: expected 1 or more"):
        ChunkReuseCache(model, store, verify=True, draft_length=0)
    with pytest.raises(ValueError, match="on_provisional: only verify=True"):
        ChunkReuseCache(model, store, on_provisional=print)


def test_sampled_tokens_are_distributed_as_without_reuse(monkeypatch):
    """Two rows at once: the joint distribution of the first two tokens of each."""
    model = tiny_llama(vocab_size=7, initializer_range=0.12, num_hidden_layers=1)
    document = prompt(100, seed=5) % 5 + 2
    store = ChunkStore()
    forward(
        model,
        torch.cat([prompt(9) % 5 + 2, document], 1),
        ChunkReuseCache(model, store),
        logits_to_keep=1,
    )
    texts = torch.cat([prompt(17, batch=2, seed=8) % 5 + 2, document.expand(2, -1)], 1)
    options = {"top_k": 0, "temperature": 0.8}
    n, counts, accepted = 400, torch.zeros(2, 49), 0
    cache = ChunkReuseCache(model, store)
    monkeypatch.setattr(type(cache.rotation), "turn", turn_wrongly)
    torch.manual_seed(3)
    for _ in range(n):
        cache = ChunkReuseCache(model, store, repair="none", verify=True, draft_length=2)
        cache._write_prompt = lambda *args: None  # or the next prompt would be known
        cache.flush = lambda: None
        out = generate(
            model,
            texts,
            cache,
            custom_generate=draft_verify,
            do_sample=True,
            max_new_tokens=2,
            **options,
        )
        accepted += cache.report().accepted_tokens
        assert cache.report().provisional_tokens == 4
        for row in range(2):
            counts[row, out[row, 117] * 7 + out[row, 118]] += 1
    assert 0.1 < accepted / (4 * n) < 0.98  # both ways of choosing took part
    for row in range(2):
        expected = joint_distribution_of_first_two(model, texts[[row]], options)
        assert chi_square_z(counts[row], expected * n) < 4.5


def joint_distribution_of_first_two(model, ids, options):
    """Probabilities ``[49]`` of the first two new tokens behind ``ids``."""
    joint = torch.zeros(7, 7)
    firsts = processed(forward(model, ids, DynamicCache())[0, -1], options)
    for a in range(7):
        after = torch.cat([ids, torch.tensor([[a]])], dim=1)
        joint[a] = firsts[a] * processed(forward(model, after, DynamicCache())[0, -1], options)
    return joint.flatten()
