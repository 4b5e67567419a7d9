"""What drafting and verifying did: rounds, tokens, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class DraftVerifyReport:
    """Counts over one ``generate``; batches add up their rows.

    Attributes:
        rounds: verifications that had drafts to check.
        drafted, accepted: tokens.
        accepted_by_round, drafted_by_round: the same, round by round.
        tokens: tokens generated, all of them chosen by the exact face.
        bytes_moved: bytes of the exact face moved to the device (or read on the CPU), prefill and
            compression included.
        draft_bytes: bytes of the draft face at the end, scales and indices counted.
        full_bytes: bytes of the exact face at the end, as they cross the link.
        dense_bytes: what the same tokens take in transformers' own cache.
        staging_bytes: the largest staging area.
        prefill_seconds, compress_seconds, draft_seconds, verify_seconds: where the time went, by
            the host's clock: on a GPU, work enqueued in one part may finish in the next.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    bytes_moved: int = 0
    draft_bytes: int = 0
    full_bytes: int = 0
    dense_bytes: int = 0
    staging_bytes: int = 0
    prefill_seconds: float = 0.0
    compress_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted_by_round: list[int] = field(default_factory=list)
    drafted_by_round: list[int] = field(default_factory=list)

    def add_round(self, drafted: int, accepted: int) -> None:
        """Counts one verification."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_by_round.append(drafted)
        self.accepted_by_round.append(accepted)

    def add(self, other: DraftVerifyReport) -> None:
        """Adds another row's counts."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "staging_bytes" else mine + theirs)

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per round; NaN before the first."""
        return self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Part of the drafted tokens that was accepted; NaN before the first round."""
        return self.accepted / self.drafted if self.drafted else float("nan")
