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
    """Pieces of code and prose in turn, each given out once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (code_text(), prose_text())
        ]
        self.at = [0, 0]
        self.turn = 0

    def take(self, tokens: int) -> str:
        """The next passage of about ``tokens`` tokens."""
        which = self.turn % 2
        self.turn += 1
        start = self.at[which]
        if start + tokens > len(self.ids[which]):
            start = 17 * self.turn  # all the way round: begins elsewhere, so it is another text
        self.at[which] = start + tokens
        text: str = self.tokenizer.decode(self.ids[which][start : start + tokens])
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
