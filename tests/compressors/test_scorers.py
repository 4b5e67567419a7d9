"""What each scorer ranks first, and how droppers share their budgets."""

from __future__ import annotations

import pytest
import torch

from hf_kvcodecs import SpeculativeKVCache, draft_verify
from hf_kvcodecs.compressors import (
    TOVA,
    Compressor,
    Dropper,
    ExpectedAttention,
    Knorm,
    KVzip,
    LayerStates,
    Online,
    Reselect,
    SnapKV,
    StreamingLLM,
    repetition_attention,
)
from hf_kvcodecs.generation.fit import fit_online

from ..harness import forward, generate, prompt, tiny_llama

HEADS, TOKENS, WIDTH = 2, 60, 16


def states(needle: int = 20, **changes) -> LayerStates:
    """Random keys; the newest queries look for token ``needle``."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(HEADS, TOKENS, WIDTH, generator=generator)
    queries = 3 * keys[:, needle].repeat_interleave(2, 0)[:, None].expand(-1, 64, -1)
    queries = queries + 0.1 * torch.randn(4, 64, WIDTH, generator=generator)
    held = {"keys": keys, "values": torch.ones_like(keys), "queries": queries[:, :TOKENS]}
    return LayerStates(**held | changes)


@pytest.mark.parametrize("scorer", [SnapKV(kernel=1), TOVA(), ExpectedAttention(), Reselect()])
def test_scorers_by_queries_find_what_is_looked_for(scorer):
    window = scorer.window_tokens
    given = states()
    given = states(queries=given.queries[:, -min(window, TOKENS) :])
    score = scorer.score(given)
    assert score.shape == (HEADS, TOKENS)
    assert score.argmax(-1).tolist() == [20, 20]
    with pytest.raises(ValueError, match="queries"):
        scorer.score(states(queries=None))


def test_attention_is_causal():
    given = states(needle=59)
    score = SnapKV(kernel=1).score(states(queries=given.queries[:, -5:]))
    # Only the last of five queries may see the last token.
    assert score[:, 59].max() <= 1 / 5 + 1e-4


def test_snapkv_pools_neighbours():
    score = SnapKV(kernel=5).score(states())
    assert set(score[0].topk(5).indices.tolist()) == {18, 19, 20, 21, 22}


def test_knorm_and_streaming_llm():
    keys = torch.randn(HEADS, TOKENS, WIDTH)
    keys[:, 7] *= 0.01
    assert Knorm().score(states(keys=keys)).argmax(-1).tolist() == [7, 7]
    assert StreamingLLM().score(states()).argmax(-1).tolist() == [59, 59]


def test_repetition_attention_against_plain_attention():
    generator = torch.Generator().manual_seed(2)
    context, new = 30, 8
    keys = torch.randn(HEADS, context + new, WIDTH, generator=generator)
    queries = torch.randn(4, new, WIDTH, generator=generator)
    seen = repetition_attention(queries, keys, 10, 18, context, None)
    assert seen.shape == (HEADS, 8)
    chosen = [*range(4), *range(10, 18), *range(context, context + new)]
    for head in range(HEADS):
        best = torch.zeros(8)
        for query in queries[2 * head : 2 * head + 2]:
            for token in range(new):
                visible = chosen[: 12 + token + 1]
                weights = (keys[head, visible] @ query[token] * WIDTH**-0.5).softmax(0)
                best = torch.maximum(best, weights[4:12])
        torch.testing.assert_close(seen[head], best)


def test_kvzip_needs_its_repetition():
    with pytest.raises(ValueError, match="observed: KVzip scores by"):
        KVzip().score(states())


def test_reselect_remembers():
    scorer = Reselect(decay=0.5)
    newest = states().queries[:, -5:]
    first = scorer.score(states(observed=torch.eye(TOKENS)[[3, 4]], queries=newest))
    assert first[0, 3] == 1
    later = scorer.score(states(previous=first[:, :50], queries=newest))
    assert later[0, 3] == 0.5
    assert later[1, 20] > 0.5


@pytest.mark.parametrize("budget", ["uniform", "heads", "model"])
def test_budgets(budget):
    scores = [torch.rand(2, 100) * scale for scale in (1.0, 3.0)]
    scores[0][1] += 5
    dropper = Dropper(scorer=Knorm(), keep=0.3, budget=budget, recent_tokens=5, sink_tokens=2)
    kept = dropper.select([score.clone() for score in scores])
    counts = [[len(head) for head in layer] for layer in kept]
    assert sum(map(sum, counts)) == 120
    for layer in kept:
        for head in layer:
            assert head.tolist() == sorted(set(head.tolist()))
            assert set(head.tolist()) >= {0, 1, 95, 96, 97, 98, 99}
    if budget == "uniform":
        assert counts == [[30, 30], [30, 30]]
    elif budget == "heads":
        assert [sum(layer) for layer in counts] == [60, 60]
        assert counts[0][1] > counts[0][0]
    else:
        assert counts[0][1] > max(counts[0][0], *counts[1])
    again = dropper.reselect(scores[0].clone(), [0.1, 0.5])
    assert [len(head) for head in again] == [10, 50]
    assert set(again[0].tolist()) >= {0, 1, 99}


def test_numbers_that_are_none_do_not_win():
    score = torch.rand(1, 50)
    score[0, 10], score[0, 11] = float("nan"), float("-inf")
    dropper = Dropper(scorer=Knorm(), keep=0.5, recent_tokens=2)
    (layer,) = dropper.select([score])
    assert not {10, 11} & set(layer[0].tolist())


def test_the_online_scorer_learns_what_kvzip_sees(tmp_path):
    model = tiny_llama()
    fitted = fit_online(model, [prompt(300, seed=seed) for seed in range(4)], chunk_tokens=100)
    assert fitted.weights.shape == (3, 2, 16 + 1 + 16 + 1 + 1)
    fitted.save(tmp_path / "online.safetensors")
    loaded = Online.load(tmp_path / "online.safetensors")
    assert torch.equal(loaded.weights, fitted.weights)
    ids = prompt(300, seed=9)
    cache = SpeculativeKVCache(
        compressor=Compressor(dropper=Dropper(scorer=KVzip(chunk_tokens=100), keep=0.5))
    )
    generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=1)
    better = 0.0
    from hf_kvcodecs.generation.inputs import RowInputs
    from hf_kvcodecs.generation.repetition import repeat_context

    with torch.no_grad():
        repeat_context(RowInputs(model, cache, {}, 300), ids)
    for layer in cache.own_layers:
        keys, values = cache.dense(layer.index)
        given = LayerStates(keys=keys[0], values=values[0], layer_idx=layer.index)
        truth = layer.observed.log().flatten()
        guesses = [scorer.score(given).flatten() for scorer in (loaded, Online())]
        fit, rule = (torch.corrcoef(torch.stack([truth, guess]))[0, 1] for guess in guesses)
        better += float(fit - rule)
        assert fit > 0.3
    assert better > 0
    out = generate(
        model,
        ids,
        SpeculativeKVCache(compressor=Compressor(dropper=Dropper(scorer=loaded, keep=0.5))),
        custom_generate=draft_verify,
        max_new_tokens=10,
    )
    assert torch.equal(out, generate(model, ids, None, max_new_tokens=10))


def test_weights_of_another_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected some for layer 3"):
        Online(weights=torch.zeros(2, 2, 35)).score(states(layer_idx=3))
    with pytest.raises(ValueError, match=r"expected \[kv_heads, features\] = \(2, 35\)"):
        Online(weights=torch.zeros(2, 2, 34)).score(states())
    with pytest.raises(ValueError, match="expected a fitted scorer"):
        Online().save(tmp_path / "x")
    with pytest.raises(ValueError, match="texts: expected token ids"):
        fit_online(tiny_llama(), [])


@pytest.mark.compat
def test_reselection_changes_what_is_kept_and_nothing_else():
    model, ids = tiny_llama(), prompt(200)
    plain = generate(model, ids, None, max_new_tokens=40)
    cache = SpeculativeKVCache(compressor="reselect", keep=0.3, draft_length=5)
    forward(model, ids[:, :-1], cache)
    first = []

    def note(*args):
        if cache.own_layers[0].draft is not None and not first:
            first.extend(cache.own_layers[0].draft.keys[:10].flatten().tolist())

    handle = model.register_forward_pre_hook(note)
    try:
        out = generate(model, ids, cache, custom_generate=draft_verify, max_new_tokens=40)
    finally:
        handle.remove()
    assert torch.equal(out, plain)
    draft = cache.own_layers[0].draft
    assert draft.keys[:10].flatten().tolist() != first
    # Each verification folds the tail in: what is generated is chosen from like the rest.
    assert draft.tail_tokens <= 6
    kept = sum(sum(layer.draft.counts) for layer in cache.own_layers)
    assert kept == pytest.approx(0.3 * 6 * 236, rel=0.05)
