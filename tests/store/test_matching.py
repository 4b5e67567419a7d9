"""What a store finds of a prompt: beginnings, text anywhere, nothing that only looks alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcodecs.store import Chunk, ChunkStore, hashing
from hf_kvcodecs.store.chunk import KV
from hf_kvcodecs.store.hashing import PROBE_TOKENS, content_key, probe_hashes, root_key, space_salt
from hf_kvcodecs.store.index import MIN_MOVED_TOKENS, ChunkIndex


def text(tokens: int, seed: int, vocabulary: int = 50_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens)


def index_of(*texts: np.ndarray, chunk: int = 40, salt: bytes = bytes(32)) -> ChunkIndex:
    index = ChunkIndex(salt)
    for ids in texts:
        parent = root_key(salt, 0)
        for start in range(0, len(ids), chunk):
            made = Chunk.make(salt, parent, ids[start : start + chunk], start)
            index.add(made)
            parent = made.chain
    return index


def check_pieces(match, ids):
    """Every piece says the very tokens that stand there, in order, without overlap."""
    spans = [*([match.prefix] if match.prefix else []), *match.moved]
    end = 0
    for span in spans:
        assert span.at >= end
        at = span.at
        for piece in span.pieces:
            assert piece.at == at
            at = piece.end
            assert np.array_equal(piece.chunk.ids[piece.start : piece.stop], ids[piece.at : at])
        end = at
    assert end <= len(ids)


@pytest.mark.parametrize("shared", [0, 1, 39, 40, 41, 100, 120, 130])
def test_a_prefix_is_found_to_the_token(shared):
    stored = text(130, 1)
    prompt = np.concatenate([stored[:shared], text(50, 2)])
    match = index_of(stored).match(prompt, 0)
    assert match.exact_tokens == shared
    assert not match.moved
    check_pieces(match, prompt)


def test_a_prefix_at_another_position_is_no_prefix():
    stored = text(130, 1)
    match = index_of(stored).match(stored, 5)
    assert match.exact_tokens == 0
    assert [span.tokens for span in match.moved] == [130]


@pytest.mark.parametrize("offset", [1, 7, 16, 39, 41, 333])
def test_text_is_found_at_every_offset(offset):
    stored = text(200, 1)
    prompt = np.concatenate([text(offset, 2), stored, text(30, 3)])
    match = index_of(stored).match(prompt, 0)
    assert [(span.at, span.tokens) for span in match.moved] == [(offset, 200)]
    check_pieces(match, prompt)


@pytest.mark.parametrize("chunk", [40, 128, 1000])
@pytest.mark.parametrize("tokens", [MIN_MOVED_TOKENS, 90, 333])
@pytest.mark.parametrize("begin", [0, 1, 15, 17, 63, 299])
def test_text_is_found_from_and_to_the_middle_of_chunks(begin, tokens, chunk):
    """A shared text need not begin or end where a chunk does."""
    stored = text(700, 1)
    prompt = np.concatenate([text(23, 2), stored[begin : begin + tokens], text(30, 3)])
    match = index_of(stored, chunk=chunk).match(prompt, 7)
    assert [(span.at, span.tokens) for span in match.moved] == [(23, tokens)]
    assert match.moved[0].pieces[0].position == begin
    check_pieces(match, prompt)


def test_a_short_find_does_not_hide_a_long_one_that_begins_a_little_later():
    shared = text(80, 1)
    first = np.concatenate([text(16, 8), shared])  # found at its first token
    second = np.concatenate([text(5, 7), first[11:], text(200, 2)])  # found five tokens later
    prompt = np.concatenate([text(30, 3), first[:90], second[84:]])
    match = index_of(first, second, chunk=500).match(prompt, 0)
    assert match.moved[0].tokens > 200
    check_pieces(match, prompt)


def test_gaps_do_not_stop_later_text_and_parts_are_found():
    first, second = text(200, 1), text(200, 2)
    prompt = np.concatenate([text(9, 3), first[25:170], text(11, 4), second[100:], text(5, 5)])
    match = index_of(first, second).match(prompt, 0)
    assert [(span.at, span.tokens) for span in match.moved] == [(9, 145), (165, 100)]
    check_pieces(match, prompt)


def test_the_longest_of_several_places_is_taken():
    shared = text(80, 1)
    short, long = (np.concatenate([shared, text(80, seed)]) for seed in (2, 3))
    prompt = np.concatenate([text(4, 9), long])
    match = index_of(short, long).match(prompt, 0)
    assert [span.tokens for span in match.moved] == [160]


def test_short_finds_are_left_alone():
    stored = text(200, 1)
    prompt = np.concatenate([text(9, 2), stored[40 : 40 + MIN_MOVED_TOKENS - 1], text(40, 3)])
    assert not index_of(stored).match(prompt, 0).moved


def test_equal_hashes_of_different_tokens_serve_nothing(monkeypatch):
    """Every probe collides; the comparison of token ids decides."""
    collide = lambda ids: np.zeros(max(len(ids) - PROBE_TOKENS + 1, 0), np.uint64)  # noqa: E731
    monkeypatch.setattr("hf_kvcodecs.store.index.probe_hashes", collide)
    monkeypatch.setattr("hf_kvcodecs.store.chunk.probe_hashes", collide)
    stored, prompt = text(200, 1), text(300, 2)
    index = index_of(stored)
    assert not index.match(prompt, 0).moved
    match = index.match(np.concatenate([prompt, stored]), 0)
    assert [(span.at, span.tokens) for span in match.moved] == [(300, 200)]


def test_one_name_for_different_chunks_serves_no_wrong_token(monkeypatch):
    """Every chunk of a text has the same name: what is found is still compared."""
    monkeypatch.setattr(hashing, "_keyed", lambda salt, purpose, data: purpose.ljust(32, b"."))
    index = index_of(text(200, 1))
    prompt = text(200, 2)
    check_pieces(index.match(prompt, 0), prompt)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=150),
    st.lists(st.integers(0, 1), min_size=1, max_size=150),
)
@settings(max_examples=60, deadline=None)
def test_pieces_are_right_in_repetitive_texts(stored, prompt):
    """Two token ids only, so that everything looks alike."""
    ids = np.array(prompt * 2)
    check_pieces(index_of(np.array(stored * 2), chunk=20).match(ids, 0), ids)


def test_removed_chunks_are_not_found():
    stored = text(120, 1)
    index = index_of(stored)
    for chain in list(index.chunks):
        index.remove(chain)
    match = index.match(np.concatenate([stored, stored]), 0)
    assert (match.prefix, match.moved) == (None, ())
    assert not index._children
    assert not index._probes
    assert not index._contents


def test_names_depend_on_model_and_namespace():
    ids = text(40, 1)
    salts = {space_salt("a", ""), space_salt("b", ""), space_salt("a", "b"), space_salt("", "a")}
    assert len(salts) == 4
    assert len({content_key(salt, ids) for salt in salts}) == 4


def test_probes_roll():
    ids = text(100, 1)
    hashes = probe_hashes(ids)
    assert len(hashes) == 100 - PROBE_TOKENS + 1
    for at in (0, 1, 50, len(hashes) - 1):
        assert probe_hashes(ids[at : at + PROBE_TOKENS])[0] == hashes[at]
    assert len(probe_hashes(ids[: PROBE_TOKENS - 1])) == 0


def random_kv(tokens: int, seed: int = 0) -> KV:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn((3, 2, tokens, 16), generator=generator),
        torch.randn((3, 2, tokens, 16), generator=generator),
    )


def test_two_models_and_two_namespaces_never_meet():
    ids = text(100, 1)
    store, other = ChunkStore(), ChunkStore(namespace="other")
    space = store.space("model a")
    chunk = Chunk.make(space.salt, root_key(space.salt, 0), ids, 0)
    space.put([(chunk, lambda: random_kv(100))])
    assert space.match(ids).exact_tokens == 100
    for stranger in (store.space("model b"), other.space("model a")):
        match = stranger.match(np.concatenate([ids, ids]))
        assert (match.prefix, match.moved) == (None, ())
