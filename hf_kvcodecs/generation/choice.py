"""Which token follows: greedy or sampled, alone or against a draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token and what it was chosen by.

    Attributes:
        token: int64 ``[1]``.
        accepted: it is the draft's.
        scores: ``[1, vocab]``, processed logits.
    """

    token: torch.Tensor
    accepted: bool
    scores: torch.Tensor


def draw(scores: torch.Tensor, sample: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A token ``[1]`` by ``scores`` ``[1, vocab]``, and the distribution it was drawn from (None if
    greedy)."""
    if not sample:
        return scores.argmax(-1), None
    probabilities = scores.softmax(-1)
    return torch.multinomial(probabilities, 1).squeeze(1), probabilities


def against_draft(
    scores: torch.Tensor, draft: torch.Tensor, draft_probabilities: torch.Tensor | None
) -> Choice:
    """The verifier's choice where a draft is at hand.

    Args:
        scores: the verifier's processed logits ``[1, vocab]``.
        draft: the drafted token ``[1]``.
        draft_probabilities: the distribution ``[1, vocab]`` that it was drawn from, None if greedy.

    Greedy: the largest score. Sampled: the draft with probability min(1, p / q), else a draw from
    the positive part of p - q, so that the token is distributed as p (Leviathan et al., arXiv
    2211.17192; Chen et al., arXiv 2302.01318).
    """
    if draft_probabilities is None:
        token = scores.argmax(-1)
        return Choice(token, bool(token == draft), scores)
    wanted = scores.softmax(-1)
    p, q = wanted[0, draft], draft_probabilities[0, draft]
    if bool(torch.rand_like(p) * q < p):
        return Choice(draft, True, scores)
    rest = (wanted - draft_probabilities).clamp_min(0)
    # Rounding may leave nothing where p and q are the same; p is right then.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
    return Choice(torch.multinomial(rest, 1).squeeze(1), False, scores)
