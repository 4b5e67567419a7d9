"""Prompts for ``reuse.py``: texts seen before, and prompts that contain them somewhere.

Nothing to run here. Every text is real (standard-library code and Python's reference), headers and
questions are unique to their prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from texts import code_text, prose_text

QUESTIONS = (
    "Which name is defined first in the text above?",
    "Summarise the text above in one sentence.",
    "What would a reader of the text above need to know beforehand?",
    "Does the text above mention an error? Which one?",
    "Name one thing that the text above does not explain.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a store has seen, and a prompt that shares text with it."""

    workload: str
    tokens: int
    seen: tuple[str, ...]
    prompt: str


class Passages:
    """Pieces of code and prose in turn: documents from the first nine tenths of each text, headers
    and the like from the last, so that no prompt contains its own document twice."""

    SHORT = 200

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        texts = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (code_text(), prose_text())
        ]
        cuts = [len(ids) * 9 // 10 for ids in texts]
        self.long = [ids[:cut] for ids, cut in zip(texts, cuts, strict=True)]
        self.short = [ids[cut:] for ids, cut in zip(texts, cuts, strict=True)]
        self.at = {"long": [0, 0], "short": [0, 0]}
        self.turn = {"long": 0, "short": 1}

    def take(self, tokens: int) -> str:
        """The next passage of about ``tokens`` tokens."""
        kind = "short" if tokens < self.SHORT else "long"
        which = self.turn[kind] % 2
        self.turn[kind] += 1
        ids: list[int] = getattr(self, kind)[which]
        start = self.at[kind][which]
        if start + tokens > len(ids):
            start = 17 * self.turn[kind]  # all the way round: begins elsewhere
        self.at[kind][which] = start + tokens
        text: str = self.tokenizer.decode(ids[start : start + tokens])
        return text.strip("\n")


def question(number: int) -> str:
    """A question of its own."""
    return f"Question {number}: {QUESTIONS[number % len(QUESTIONS)]}\nAnswer:"


def warm_cases(passages: Passages, tokens: int, count: int) -> Iterator[Case]:
    """A document at the beginning of the prompt, seen with another question."""
    for number in range(count):
        document = passages.take(tokens)
        yield Case(
            workload="warm prefix",
            tokens=tokens,
            seen=(f"{document}\n\n{question(100 + number)}",),
            prompt=f"{document}\n\n{question(number)}",
        )


def moved_cases(passages: Passages, tokens: int, count: int) -> Iterator[Case]:
    """A document behind a header of 40 to 110 tokens, seen behind a shorter one."""
    for number in range(count):
        document = passages.take(tokens)
        before, header = passages.take(30), passages.take(40 + 37 * number % 70)
        yield Case(
            workload="moved document",
            tokens=tokens,
            seen=(f"{before}\n\n{document}\n\n{question(100 + number)}",),
            prompt=f"{header}\n\n{document}\n\n{question(number)}",
        )


def interleaved_cases(passages: Passages, tokens: int, count: int) -> Iterator[Case]:
    """Four documents in another order, unique text between them; each was seen in its own
    prompt."""
    for number in range(count):
        documents = [passages.take(tokens // 4) for _ in range(4)]
        seen = tuple(
            f"{passages.take(20)}\n\n{document}\n\n{question(100 + number)}"
            for document in documents
        )
        parts = [f"{passages.take(25)}\n\n{documents[i]}" for i in (2, 0, 3, 1)]
        yield Case(
            workload="interleaved documents",
            tokens=tokens,
            seen=seen,
            prompt="\n\n".join([*parts, question(number)]),
        )


WORKLOADS = {"warm": warm_cases, "moved": moved_cases, "interleaved": interleaved_cases}
