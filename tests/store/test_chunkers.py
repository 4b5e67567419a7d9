"""Where texts are cut."""

from __future__ import annotations

import numpy as np
import pytest

from hf_kvcodecs.store import DocumentChunker, Ends, FixedChunker, ParagraphChunker
from hf_kvcodecs.store.chunkers import make_chunker, text_ends

CHUNKERS = [FixedChunker(), ParagraphChunker(), DocumentChunker()]


def paragraphs(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A text of paragraphs of these lengths, with a sentence's end every 12 tokens."""
    ids = np.random.default_rng(seed).integers(0, 50_000, sum(lengths))
    ends = np.zeros(len(ids), np.uint8)
    ends[11::12] = Ends.SENTENCE
    ends[np.cumsum(lengths) - 1] = Ends.PARAGRAPH
    return ids, ends


@pytest.mark.parametrize("chunker", CHUNKERS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("tokens", [0, 1, 15, 128, 129, 1000])
@pytest.mark.parametrize("known", [True, False], ids=["text", "ids"])
def test_cuts_cover_the_text(chunker, tokens, known):
    ids, ends = paragraphs([tokens]) if tokens else (np.zeros(0, np.int64), np.zeros(0, np.uint8))
    cuts = chunker.cuts(ids, ends if known else np.zeros_like(ends))
    assert cuts == sorted(set(cuts))
    assert (cuts[-1] if cuts else 0) == tokens
    assert 0 not in cuts


@pytest.mark.parametrize("known", [True, False], ids=["text", "ids"])
@pytest.mark.parametrize("inserted", [1, 7, 50, 300])
def test_a_paragraph_is_cut_alike_wherever_it_stands(inserted, known):
    ids, ends = paragraphs([80, 200, 60, 45, 500, 90, 33, 10, 120], seed=1)
    head, head_ends = paragraphs([inserted], seed=2)
    if not known:
        ends, head_ends = np.zeros_like(ends), np.zeros_like(head_ends)
    before = ParagraphChunker().cuts(ids, ends)
    after = ParagraphChunker().cuts(np.concatenate([head, ids]), np.concatenate([head_ends, ends]))
    same = {cut + inserted for cut in before} & set(after)
    assert len(same) >= len(before) - 3  # those beside the insertion may differ


def test_long_paragraphs_are_cut_at_sentences():
    ids, ends = paragraphs([1000])
    cuts = ParagraphChunker(max_tokens=128).cuts(ids, ends)
    assert max(np.diff([0, *cuts])) <= 160
    assert all(ends[cut - 1] for cut in cuts)


def test_fixed_chunks_are_nudged_to_an_end():
    ids, ends = paragraphs([1000])
    cuts = FixedChunker(tokens=128, window=16).cuts(ids, ends)
    assert all(ends[cut - 1] for cut in cuts[:-1])
    assert max(np.diff([0, *cuts])) <= 144


def test_documents_end_at_special_tokens():
    ids, ends = paragraphs([100, 100])
    ends[49] = Ends.DOCUMENT
    assert DocumentChunker().cuts(ids, ends) == [50, 200]


def test_what_tokens_end():
    ends = text_ends(["a", ".", "\n\n", "\n", " word,", "<eos>", "! "], {5})
    assert ends.tolist() == [0, 2, 3, 2, 1, 4, 2]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: make_chunker("words"), "chunker: expected one of fixed, paragraph, document"),
    (lambda: FixedChunker(tokens=3), "tokens: expected a number of tokens of at least 16"),
    (lambda: FixedChunker(tokens=32, window=32), "window: expected 0 to 31"),
    (lambda: ParagraphChunker(min_tokens=64, max_tokens=32), "at most max_tokens"),
], ids=["name", "tokens", "window", "order"])  # fmt: skip
def test_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="cuts"):
        make_chunker(3)
