"""How long drafts become."""

from __future__ import annotations

from hf_kvcodecs.generation.draft_length import AdaptiveLength, FixedLength, draft_length


def after(accepted: int, drafted: int, verify_seconds: float, rounds: int = 30) -> int:
    rule = AdaptiveLength()
    for _ in range(rounds):
        rule.observe(drafted, accepted, 0.01 * drafted, verify_seconds)
    return rule.next()


def test_what_the_option_makes():
    assert draft_length(7).next() == 7
    assert isinstance(draft_length(7), FixedLength)
    assert isinstance(draft_length("auto"), AdaptiveLength)


def test_longer_where_more_is_accepted_and_a_verification_costs_more():
    assert after(0, 10, 0.1) == 1
    assert after(2, 10, 0.1) < after(6, 10, 0.1) < after(10, 10, 0.1)
    assert after(6, 10, 0.01) < after(6, 10, 0.1) < after(6, 10, 1.0)
    assert after(10, 10, 10.0) == 64


def test_the_best_of_all_lengths():
    """Against the expectation written out: a 5 % chance of rejection, a verification worth 8
    drafted tokens."""
    rule = AdaptiveLength(prior_accepted=19, prior_rejected=1)
    rule.observe(0, 0, 0.0, 0.0)
    rule._accepted, rule._rejected, rule._draft, rule._verify = 19.0, 1.0, 1.0, 8.0

    def rate(length):
        expected = sum(0.95**place for place in range(1, length + 1)) + 1
        return expected / (length + 8)

    assert rule.next() == max(range(1, 65), key=rate)


def test_it_adapts_within_a_few_rounds():
    rule = AdaptiveLength()
    for _ in range(20):
        rule.observe(20, 20, 0.2, 0.1)
    long = rule.next()
    for _ in range(5):
        rule.observe(20, 1, 0.2, 0.1)
    assert rule.next() < long / 3
