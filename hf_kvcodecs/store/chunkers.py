"""Where a text is cut into chunks: fixed lengths, paragraphs and sentences, whole documents.

A chunker sees token ids and, for each token, how strong an end it is (:class:`Ends`). Boundaries
decide what is stored and evicted as one; what is *found* does not depend on them, since matches
begin and end at any token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .hashing import Ids

Strengths = npt.NDArray[np.uint8]


class Ends(IntEnum):
    """What a token ends."""

    NOTHING = 0
    CLAUSE = 1
    SENTENCE = 2
    PARAGRAPH = 3
    DOCUMENT = 4


class Chunker(Protocol):
    """Cuts a text."""

    def cuts(self, ids: Ids, ends: Strengths) -> list[int]:
        """Ascending offsets of chunk ends, the last one ``len(ids)``; none for an empty text.

        Args:
            ids: token ids ``[tokens]``.
            ends: for each token what it ends, an :class:`Ends` as uint8 ``[tokens]``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChunker:
    """Chunks of about ``tokens`` tokens; an end within ``window`` tokens of that is preferred."""

    tokens: int = 128
    window: int = 16

    def __post_init__(self) -> None:
        _check_sizes(tokens=self.tokens)
        if not 0 <= self.window < self.tokens:
            raise ValueError(f"window: expected 0 to {self.tokens - 1}, got {self.window!r}")

    def cuts(self, ids: Ids, ends: Strengths) -> list[int]:
        return _cut_long(0, len(ids), self.tokens, self.window, ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParagraphChunker:
    """One paragraph a chunk. Short ones join the paragraph before them, long ones are cut at
    sentences.

    Whether a paragraph starts a chunk depends on its own length and the one before it, so the
    same paragraph is cut the same way wherever it stands. Where nothing is known of the tokens'
    text (every end is ``NOTHING``), a hash of the tokens around a place decides instead.

    Args:
        min_tokens: shorter paragraphs join the one before.
        max_tokens: longer ones are cut near a sentence's end.
    """

    min_tokens: int = 32
    max_tokens: int = 256

    def __post_init__(self) -> None:
        _check_sizes(min_tokens=self.min_tokens, max_tokens=self.max_tokens)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens ({self.max_tokens}), got "
                f"{self.min_tokens}"
            )

    def cuts(self, ids: Ids, ends: Strengths) -> list[int]:
        paragraphs = _paragraph_ends(ids, ends)
        cuts: list[int] = []
        begin = start = 0  # of the chunk, of the paragraph
        for end in paragraphs:
            if end - start >= self.min_tokens and start > begin:
                cuts += _cut_long(begin, start, self.max_tokens, self.max_tokens // 4, ends)
                begin = start
            start = end
        return cuts + _cut_long(begin, len(ids), self.max_tokens, self.max_tokens // 4, ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentChunker:
    """One document a chunk, up to special tokens such as an end of turn."""

    def cuts(self, ids: Ids, ends: Strengths) -> list[int]:
        cuts = (np.flatnonzero(ends >= Ends.DOCUMENT) + 1).tolist()
        return [*cuts, len(ids)] if len(ids) and (not cuts or cuts[-1] < len(ids)) else cuts


CHUNKERS: dict[str, type[FixedChunker | ParagraphChunker | DocumentChunker]] = {
    "fixed": FixedChunker,
    "paragraph": ParagraphChunker,
    "document": DocumentChunker,
}


def make_chunker(chunker: str | Chunker) -> Chunker:
    """The chunker of that name, or the given one."""
    if isinstance(chunker, str):
        if chunker not in CHUNKERS:
            raise ValueError(
                f"chunker: expected one of {', '.join(CHUNKERS)} or an object with cuts(ids, "
                f"ends), got {chunker!r}"
            )
        return CHUNKERS[chunker]()
    if not callable(getattr(chunker, "cuts", None)):
        raise TypeError(f"chunker: expected a method cuts(ids, ends), got {type(chunker).__name__}")
    return chunker


def text_ends(pieces: list[str], special: set[int]) -> Strengths:
    """For every token of a vocabulary what it ends, uint8 ``[len(pieces)]``.

    Args:
        pieces: each token's text.
        special: ids of tokens that end a document.
    """
    strengths = np.zeros(len(pieces), np.uint8)
    for token, piece in enumerate(pieces):
        text = piece.rstrip(" \t\r")
        if token in special:
            strengths[token] = Ends.DOCUMENT
        elif text.count("\n") >= 2:
            strengths[token] = Ends.PARAGRAPH
        elif text.endswith((".", "!", "?", "\n", "。", "！", "？")):  # noqa: RUF001
            strengths[token] = Ends.SENTENCE
        elif text.endswith((",", ";", ":", ")")):
            strengths[token] = Ends.CLAUSE
    return strengths


def _paragraph_ends(ids: Ids, ends: Strengths) -> list[int]:
    if len(ids) and not ends.any():
        marks = (ids * 0x2545F491 + np.roll(ids, 1) * 0x9E3779B1) % 64 == 0
    else:
        marks = ends >= Ends.PARAGRAPH
        newlines = ends == Ends.SENTENCE
        # Two newline tokens in a row end a paragraph as one of "\n\n" does; telling newlines from
        # full stops needs no text here: two sentence ends in a row are rare otherwise.
        marks = marks | (newlines & np.roll(newlines, 1))
    cuts: list[int] = (np.flatnonzero(marks) + 1).tolist()
    return cuts if cuts and cuts[-1] == len(ids) else [*cuts, len(ids)]


def _cut_long(begin: int, end: int, tokens: int, window: int, ends: Strengths) -> list[int]:
    """Cuts of ``begin .. end`` into pieces of about ``tokens``, at the strongest and nearest end
    within ``window``."""
    cuts = []
    while end - begin > tokens + window:
        target = begin + tokens
        places = np.arange(target - window, target + 1)
        weight = ends[places - 1].astype(np.int64) * (window + 1) - (target - places)
        begin = int(places[int(np.argmax(weight))])
        cuts.append(begin)
    return [*cuts, end] if end > begin else cuts


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 16:
            raise ValueError(f"{name}: expected a number of tokens of at least 16, got {value!r}")
