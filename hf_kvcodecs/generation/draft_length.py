"""How many tokens to draft before the next verification."""

from __future__ import annotations

from abc import ABC, abstractmethod


class DraftLength(ABC):
    """Names the next draft's length, and is told how the last one went."""

    @abstractmethod
    def next(self) -> int:
        """Tokens to draft, at least 1."""

    def observe(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """One round's outcome."""
        return


class FixedLength(DraftLength):
    """The same length each time."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def next(self) -> int:
        return self.tokens


class AdaptiveLength(DraftLength):
    """The length with the largest expected tokens per second, from what this request has shown.

    A drafted token is taken to be accepted with one probability, whatever its place: accepted and
    first rejected tokens are counted, older rounds less. A drafted token's and a verification's
    seconds are measured alike. Tokens of a round of ``x`` drafts are then ``p (1 - p^x) / (1 - p) +
    1``, its time ``x d + v``.

    Args:
        longest: no draft is longer.
        decay: weight of a round against the next one's.
        prior_accepted, prior_rejected: counts to begin with.
    """

    def __init__(
        self,
        longest: int = 64,
        decay: float = 0.85,
        prior_accepted: float = 9.0,
        prior_rejected: float = 1.0,
    ) -> None:
        self.longest, self.decay = longest, decay
        self._accepted, self._rejected = prior_accepted, prior_rejected
        self._draft = self._verify = self._weight = 0.0

    @property
    def probability(self) -> float:
        """That a drafted token is accepted."""
        return self._accepted / (self._accepted + self._rejected)

    def observe(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        self._accepted = self.decay * self._accepted + accepted
        self._rejected = self.decay * self._rejected + (accepted < drafted)
        self._weight = self.decay * self._weight + 1
        self._draft = self.decay * self._draft + draft_seconds / max(drafted, 1)
        self._verify = self.decay * self._verify + verify_seconds

    def next(self) -> int:
        # A verification costs as much as some drafted tokens; until measured, ten.
        cost = self._verify / self._draft if self._draft > 0 else 10.0
        probability = min(self.probability, 0.999)

        def rate(tokens: int) -> float:
            expected = probability * (1 - probability**tokens) / (1 - probability)
            return (expected + 1) / (tokens + cost)

        return max(range(1, self.longest + 1), key=rate)


def draft_length(option: int | str) -> DraftLength:
    """The rule for ``SpeculativeKVCache(draft_length=...)``."""
    return AdaptiveLength() if option == "auto" else FixedLength(int(option))
