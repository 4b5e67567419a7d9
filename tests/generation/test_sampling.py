"""Sampled tokens are distributed as the exact face has them, whatever the draft face says."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from hf_kvcodecs import SpeculativeKVCache, draft_verify
from hf_kvcodecs.generation.choice import against_draft, draw

from ..harness import forward, generate, prompt, tiny_llama

pytestmark = pytest.mark.compat


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean; cells with fewer
    than five expected are joined."""
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_check_sees_a_wrong_distribution():
    torch.manual_seed(0)
    wanted = torch.rand(8).softmax(0)
    counts = torch.multinomial(torch.rand(8).softmax(0), 4000, True).bincount(minlength=8).float()
    assert chi_square_z(counts, wanted * 4000) > 6


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_against_a_draft(temperature):
    torch.manual_seed(1)
    p = torch.randn(1, 12) * 2 / temperature
    q = torch.randn(1, 12) * 2 / temperature
    n = 6000
    counts, accepted = torch.zeros(12), 0
    for _ in range(n):
        token, distribution = draw(q, True)
        choice = against_draft(p, token, distribution)
        counts[choice.token] += 1
        accepted += choice.accepted
        assert not choice.accepted or choice.token == token
    assert chi_square_z(counts, p.softmax(-1)[0] * n) < 4
    overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
    assert accepted / n == pytest.approx(overlap, abs=0.03)


def test_the_same_distributions_accept_everything():
    scores = torch.randn(1, 12)
    for _ in range(200):
        token, distribution = draw(scores, True)
        assert against_draft(scores, token, distribution).accepted


@pytest.mark.parametrize(
    ("options", "how"),
    [({"temperature": 0.7}, {}), ({"top_k": 4}, {"prompt_lookup_num_tokens": 3})],
    ids=["temperature", "top_k-lookup"],
)
def test_second_and_third_token_of_generate(options, how):
    """The joint distribution of the two tokens behind the first: drafted, corrected, or extra."""
    model = tiny_llama(vocab_size=7, initializer_range=0.12, num_hidden_layers=1)
    ids = prompt(24) % 5 + 2
    options = {"top_k": 0, "temperature": 1.0} | options
    first = 3
    text = torch.cat([ids, torch.tensor([[first]])], dim=1)
    expected = joint_distribution(model, text, options)
    n = 1000
    counts = torch.zeros(49)
    base = SpeculativeKVCache(compressor="streaming_llm", keep=0.2, draft_length=2)
    forward(model, ids, base)
    accepted = drafted = 0
    torch.manual_seed(3)
    for _ in range(n):
        base.crop(24 - base.get_seq_length())
        out = generate(
            model,
            text,
            base,
            custom_generate=draft_verify,
            do_sample=True,
            max_new_tokens=3,
            attention_mask=torch.ones_like(text),
            **options,
            **how,
        )
        counts[out[0, 26] * 7 + out[0, 27]] += 1
        accepted += base.report().accepted
        drafted += base.report().drafted
    assert 0.1 < accepted / drafted < 0.98  # both ways of choosing took part
    assert chi_square_z(counts, expected * n) < 4.5


def joint_distribution(model, text, options):
    """Probabilities ``[49]`` of the second and third new token behind ``text``, by enumeration."""
    joint = torch.zeros(7, 7)
    firsts = processed(forward(model, text, DynamicCache())[0, -1], options)
    for a in range(7):
        after = torch.cat([text, torch.tensor([[a]])], dim=1)
        seconds = processed(forward(model, after, DynamicCache())[0, -1], options)
        for b in range(7):
            longer = torch.cat([after, torch.tensor([[b]])], dim=1)
            thirds = processed(forward(model, longer, DynamicCache())[0, -1], options)
            joint[b] += firsts[a] * seconds[b] * thirds
    return joint.flatten()


def processed(logits, options):
    logits = logits.float() / options["temperature"]
    if options["top_k"]:
        smallest = logits.topk(options["top_k"]).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return logits.softmax(-1)
