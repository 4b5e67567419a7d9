"""What a reuse did, as numbers and as one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """Tokens of the latest prompt, over all rows of the batch, padding left out.

    Args:
        total_tokens: of the prompt.
        exact_tokens: reused bit for bit, as the beginning of a text seen before.
        moved_tokens: reused from another place or behind another text, or from a lossy store.
        recomputed_tokens: of the moved ones, computed again by the repair.
        stored_tokens: written to the store so far, the reply's included.
        reused_bytes: keys and values that were not computed.
        lookup_seconds: from the call of the model to the end of the lookup and assembly.
        repair_seconds: choosing what to recompute.
        prefill_seconds: from the call of the model to the logits, all of the above included.
        provisional_tokens: with ``verify``, drafted on moved text. Where there are any, all numbers
            above but ``stored_tokens`` are of the prefill that was drafted on.
        accepted_tokens: of these, confirmed by the exact prefill.
        provisional_seconds: from the call of the decoder to the first provisional token.
        verified_seconds: from the call of the decoder to the first verified token.
    """

    total_tokens: int = 0
    exact_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    stored_tokens: int = 0
    reused_bytes: int = 0
    lookup_seconds: float = 0.0
    repair_seconds: float = 0.0
    prefill_seconds: float = 0.0
    provisional_tokens: int = 0
    accepted_tokens: int = 0
    provisional_seconds: float = 0.0
    verified_seconds: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        reused = self.exact_tokens + self.moved_tokens - self.recomputed_tokens
        return self.total_tokens - reused

    @property
    def reuse_ratio(self) -> float:
        """The share of the prompt that did not go through the model, 0 to 1."""
        return 1 - self.computed_tokens / self.total_tokens if self.total_tokens else 0.0

    def __str__(self) -> str:
        verified = (
            f"; {self.accepted_tokens} of {self.provisional_tokens} provisional tokens accepted, "
            f"the first after {1e3 * self.provisional_seconds:.1f} ms, verified after "
            f"{1e3 * self.verified_seconds:.1f} ms"
        )
        return (
            f"{self.total_tokens} tokens: {self.exact_tokens} exact, {self.moved_tokens} moved "
            f"({self.recomputed_tokens} of them recomputed), {self.computed_tokens} computed; "
            f"{self.reused_bytes / 2**20:.1f} MiB reused; lookup {1e3 * self.lookup_seconds:.1f}, "
            f"repair {1e3 * self.repair_seconds:.1f}, first token "
            f"{1e3 * self.prefill_seconds:.1f} ms{verified if self.provisional_tokens else ''}"
        )
