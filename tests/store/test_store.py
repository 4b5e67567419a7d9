"""The bound, eviction, codecs at rest, damaged files, many threads, processes and servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_kvcodecs import ChunkStore
from hf_kvcodecs.cli import main
from hf_kvcodecs.errors import CorruptDataError, UnsupportedLayoutError
from hf_kvcodecs.store import Chunk
from hf_kvcodecs.store.files import from_bytes, to_bytes
from hf_kvcodecs.store.hashing import root_key
from hf_kvcodecs.store.packing import pack, packed_bytes, unpack
from hf_kvcodecs.store.store import parse_bytes

from ..harness import assert_same_bits
from .test_matching import random_kv, text

CHUNK_BYTES = 2 * 3 * 2 * 100 * 16 * 4  # of random_kv(100)


def put(space, ids, kv=None, chunk=100):
    """Stores a text in chunks; the chunks."""
    keys, values = kv or random_kv(len(ids))
    parent, chunks = root_key(space.salt, 0), []
    for start in range(0, len(ids), chunk):
        made = Chunk.make(space.salt, parent, ids[start : start + chunk], start)
        stop = start + made.tokens
        part = keys[:, :, start:stop], values[:, :, start:stop]
        chunks.append((made, lambda part=part: part))
        parent = made.chain
    space.put(chunks)
    return [made for made, _ in chunks]


@pytest.mark.parametrize(("size", "expected"), [
    (100, 100), ("100", 100), ("2GiB", 2**31), ("1.5 kb", 1500), ("512 MiB", 2**29),
])  # fmt: skip
def test_sizes(size, expected):
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "2 potatoes", "-1", 0, -5, None, True, 1.5])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="expected a size such as"):
        parse_bytes(size)


@pytest.mark.parametrize("options", [{"codec": "zip"}, {"remote": "nowhere"}, {"chunker": "x"}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        ChunkStore(**options)


def test_bytes_never_exceed_the_bound_and_new_texts_keep_coming_in():
    """12 distinct texts through a store of 4 chunks."""
    store = ChunkStore(max_bytes=4 * CHUNK_BYTES + 8000)
    space = store.space("m")
    for seed in range(12):
        ids = text(100, seed)
        put(space, ids)
        assert store.stats().bytes <= store.max_bytes
        assert space.match(ids).exact_tokens == 100
        for _ in range(20):  # much used, which must not freeze the store
            assert space.load(space.match(ids).prefix.pieces[0].chunk) is not None
    assert store.stats().chunks == 4
    assert store.stats().evicted == 8


def test_a_long_text_does_not_push_out_its_own_beginning():
    store = ChunkStore(max_bytes=4 * CHUNK_BYTES + 8000)
    space = store.space("m")
    ids = text(1000, 1)
    for _ in range(3):
        put(space, ids)
        assert space.match(ids).exact_tokens == 400
        assert store.stats().bytes <= store.max_bytes


def test_pinned_chunks_stay():
    store = ChunkStore(max_bytes=4 * CHUNK_BYTES + 8000)
    space = store.space("m")
    kept = text(200, 99)
    chunks = put(space, kept)
    space.pin(chunks)
    for seed in range(10):
        put(space, text(100, seed))
    assert space.match(kept).exact_tokens == 200
    space.pin(chunks, False)
    for seed in range(10):
        put(space, text(100, 50 + seed))
    assert space.match(kept).exact_tokens == 0


def test_important_and_used_chunks_stay_longer():
    store = ChunkStore(max_bytes=3 * CHUNK_BYTES + 8000)
    space = store.space("m")
    loud, quiet, used = text(100, 1), text(100, 2), text(100, 3)
    put(space, quiet, tuple(t * 0.1 for t in random_kv(100)))
    put(space, loud, tuple(t * 10 for t in random_kv(100)))
    put(space, used)
    for _ in range(8):
        space.load(space.match(used).prefix.pieces[0].chunk)
    put(space, text(100, 4))
    assert space.match(quiet).exact_tokens == 0
    assert space.match(loud).exact_tokens == space.match(used).exact_tokens == 100


def test_copies_of_one_text_go_first():
    """The same paragraph behind many headers does not flood the store."""
    store = ChunkStore(max_bytes=7 * CHUNK_BYTES + 8000)
    space = store.space("m")
    alone, shared = text(100, 1), text(100, 2)
    put(space, alone)
    for seed in range(10):
        put(space, np.concatenate([text(100, 100 + seed), shared]))
    copies = sum(np.array_equal(c.ids, shared) for c in space.index.chunks.values())
    assert copies <= 3


def test_a_chunk_larger_than_the_store_is_left_out():
    store = ChunkStore(max_bytes=1000)
    put(store.space("m"), text(100, 1))
    assert (store.stats().chunks, store.stats().rejected) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 15, 16, 100, 129])
@pytest.mark.parametrize("codec", [None, "gaac"])
def test_exact_codecs_keep_every_bit(codec, tokens, dtype):
    keys, values = (t.to(dtype) for t in random_kv(tokens))
    keys[0, 0, 0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    packed = pack((keys, values), codec)
    for got, expected in zip(unpack(*packed), (keys, values), strict=True):
        assert_same_bits(got, expected)


def test_gaac_is_smaller():
    kv = tuple(t.to(torch.bfloat16) for t in random_kv(128))
    assert packed_bytes(*pack(kv, "gaac")) < 0.85 * packed_bytes(*pack(kv, None))


@pytest.mark.parametrize(("codec", "steps", "factor"), [("int8", 255, 3.0), ("int4", 15, 4.5)])
def test_lossy_codecs_stay_within_half_a_step(codec, steps, factor):
    """Keys per channel, values per token."""
    keys, values = random_kv(128)
    packed = pack((keys, values), codec)
    for got, expected, axis in zip(unpack(*packed), (keys, values), (2, 3), strict=True):
        step = (expected.amax(axis, keepdim=True) - expected.amin(axis, keepdim=True)) / steps
        assert ((got - expected).abs() <= 0.51 * step + 1e-6).all()
    assert packed_bytes(*pack((keys, values), None)) / packed_bytes(*packed) > factor


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_constant_channels_survive(codec):
    keys = torch.full((1, 1, 32, 15), 3.5)
    for got in unpack(*pack((keys, keys), codec)):
        assert torch.equal(got, keys)


@pytest.mark.parametrize("codec", [None, "gaac", "int8"])
def test_a_chunk_s_file_comes_back(codec):
    chunk = Chunk.make(b"s" * 32, b"p" * 32, text(40, 1), 7)
    packed = pack(random_kv(40), codec)
    again, restored = from_bytes(b"s" * 32, chunk.chain, to_bytes(chunk, packed))
    assert (again.chain, again.parent, again.position) == (chunk.chain, chunk.parent, 7)
    assert np.array_equal(again.ids, chunk.ids)
    for got, expected in zip(unpack(*restored), unpack(*packed), strict=True):
        assert_same_bits(got, expected)


def test_damaged_bytes_are_refused():
    """Cut anywhere or with any byte changed, a file is refused, never read wrongly."""
    salt = b"s" * 32
    chunk = Chunk.make(salt, b"p" * 32, text(20, 1), 0)
    data = to_bytes(chunk, pack(tuple(t[:1] for t in random_kv(20)), None))
    rng = np.random.default_rng(0)
    for at in [0, 3, 7, 8, 9, len(data) - 1, *rng.integers(0, len(data), 150).tolist()]:
        with pytest.raises((CorruptDataError, UnsupportedLayoutError)):
            from_bytes(salt, chunk.chain, data[:at])
        flipped = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises((CorruptDataError, UnsupportedLayoutError)):
            from_bytes(salt, chunk.chain, flipped)
    with pytest.raises(CorruptDataError, match="not its chunk's"):
        from_bytes(b"t" * 32, chunk.chain, data)


def test_a_newer_file_is_left_alone(tmp_path):
    store = ChunkStore(disk=tmp_path)
    chunk = put(store.space("m"), text(100, 1))[0]
    file = next(tmp_path.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b'"version":"1"', b'"version":"9"'))
    fresh = ChunkStore(disk=tmp_path).space("m")
    assert fresh.match(chunk.ids).exact_tokens == 0
    assert file.exists()


def tiers(tmp_path, redis_url=None):
    return {"disk": {"disk": tmp_path / "d"}, "fsspec": {"remote": f"file://{tmp_path}/f"},
            "redis": {"remote": redis_url}}  # fmt: skip


@pytest.fixture(params=["disk", "fsspec", "redis"])
def tier(request, tmp_path):
    """Options of a store with one tier behind memory."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    options = tiers(tmp_path, url)[request.param] | {"namespace": str(tmp_path)}
    yield options
    ChunkStore(**options).clear()


@pytest.mark.parametrize("codec", [None, "gaac", "int4"])
def test_what_one_store_wrote_another_finds(tier, codec):
    ids, kv = text(250, 1), random_kv(250)
    put(ChunkStore(**tier, codec=codec).space("m"), ids, kv)
    store = ChunkStore(**tier, codec=codec)
    space = store.space("m")
    pieces = space.match(ids).prefix.pieces
    assert sum(p.stop for p in pieces) == 250
    got = torch.cat([space.load(piece.chunk)[0] for piece in pieces], 2)
    if codec == "int4":
        assert (got - kv[0]).abs().max() < 0.5
    else:
        assert_same_bits(got, kv[0])
    assert store.stats().chunks == 3
    assert store.stats().failures == 0
    assert ChunkStore(**tier, codec=codec).space("other").match(ids).prefix is None


def test_what_memory_evicts_comes_back_from_behind(tier):
    store = ChunkStore(**tier, max_bytes=2 * CHUNK_BYTES + 4000)
    space = store.space("m")
    texts = [text(100, seed) for seed in range(6)]
    for seed, ids in enumerate(texts):
        put(space, ids, random_kv(100, seed))
    for seed, ids in enumerate(texts):
        piece = space.match(ids).prefix.pieces[0]
        assert_same_bits(space.load(piece.chunk)[1], random_kv(100, seed)[1])
        assert store.stats().bytes <= store.max_bytes


def test_clear_forgets_all_tiers(tier):
    store = ChunkStore(**tier)
    put(store.space("m"), text(100, 1))
    store.clear()
    assert store.space("m").match(text(100, 1)).prefix is None
    assert ChunkStore(**tier).space("m").match(text(100, 1)).prefix is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other name", "gone"])
def test_damaged_files_are_misses_and_removed(tmp_path, damage):
    ids = text(100, 1)
    put(ChunkStore(disk=tmp_path).space("m"), ids)
    store = ChunkStore(disk=tmp_path)
    space = store.space("m")
    found = space.match(ids).prefix.pieces[0]
    file = next(tmp_path.glob("*/*.safetensors"))
    data = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(data[:-9])
    elif damage == "flip":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "other name":
        other = Chunk.make(space.salt, b"q" * 32, text(100, 2), 0)
        file.write_bytes(to_bytes(other, pack(random_kv(100), None)))
    else:
        file.unlink()
    assert space.load(found.chunk) is None
    assert not file.exists()
    assert space.match(ids).prefix is None
    assert store.stats().damaged == (damage != "gone")
    put(space, ids)
    assert ChunkStore(disk=tmp_path).space("m").match(ids).exact_tokens == 100


def test_verify_removes_what_is_damaged(tmp_path):
    store = ChunkStore(disk=tmp_path)
    space = store.space("m")
    put(space, text(300, 1))
    assert store.verify() == 0
    file = sorted(tmp_path.glob("*/*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    assert store.verify() == 1
    assert not file.exists()


def test_the_disk_is_bounded_too(tmp_path):
    store = ChunkStore(disk=tmp_path, disk_bytes=5 * CHUNK_BYTES)
    for seed in range(12):
        put(store.space("m"), text(100, seed))
        held = sum(f.stat().st_size for f in tmp_path.glob("*/*.safetensors"))
        assert held <= 5 * CHUNK_BYTES


@pytest.mark.parametrize("kind", ["disk", "fsspec"])
def test_files_of_others_are_left_alone(tmp_path, kind):
    """A folder that holds model weights too: neither the bound nor ``clear`` touches them."""
    others = [tmp_path / "llama" / "model.safetensors", tmp_path / "notes.txt",
              tmp_path / ("0" * 32) / "mine.safetensors"]  # fmt: skip
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(bytes(9 * CHUNK_BYTES))
    bound = {"disk": tmp_path, "disk_bytes": 2 * CHUNK_BYTES}
    store = ChunkStore(**bound if kind == "disk" else {"remote": f"file://{tmp_path}"})
    for seed in range(3):
        put(store.space("m"), text(100, seed))
    assert store.verify() == 0
    if kind == "disk":
        assert main(["store", str(tmp_path), "--verify"]) == 0
    store.clear()
    assert all(other.exists() for other in others)
    assert [f for f in tmp_path.rglob("*.safetensors") if f not in others] == []


def test_a_dead_server_is_a_miss_and_no_crash(caplog):
    pytest.importorskip("redis")
    store = ChunkStore(remote="redis://127.0.0.1:1/0")
    space = store.space("m")
    ids = text(100, 1)
    put(space, ids)
    assert space.match(ids).exact_tokens == 100
    assert space.load(space.match(ids).prefix.pieces[0].chunk) is not None
    assert store.stats().failures >= 1


def test_many_threads_share_a_store():
    store = ChunkStore(max_bytes=6 * CHUNK_BYTES)
    space = store.space("m")
    errors = []

    def work(worker: int) -> None:
        try:
            for turn in range(40):
                seed = (worker + turn) % 9
                ids = text(200, seed)
                put(space, ids, random_kv(200, seed))
                match = space.match(ids)
                for piece in match.prefix.pieces if match.prefix else ():
                    kv = space.load(piece.chunk)
                    if kv is not None:
                        stop = piece.at + piece.chunk.tokens
                        expected = random_kv(200, seed)[0][:, :, piece.at : stop]
                        assert torch.equal(kv[0], expected)
                assert store.stats().bytes <= store.max_bytes
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


WRITER = """
import sys, torch
sys.path.insert(0, {root!r})
from tests.store.test_store import put, random_kv, text, ChunkStore
space = ChunkStore(**{options!r}).space("m")
seed = int(sys.argv[1])
print("ready", flush=True)
while True:
    put(space, text(100, seed), random_kv(100, seed))
    seed += 1
"""


def test_kill_in_the_middle_of_writing_loses_at_most_that_chunk(tier):
    """Two processes write into one folder or server and are killed; every chunk there is whole."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    options = {name: str(value) for name, value in tier.items()}
    code = WRITER.format(root=root, options=options)
    writers = [
        subprocess.Popen([sys.executable, "-c", code, seed], stdout=subprocess.PIPE, text=True)
        for seed in ("0", "100000")
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for _ in range(600):
        space = ChunkStore(**options).space("m")
        begun = all(space.match(text(100, seed)).exact_tokens for seed in (0, 100_000))
        if begun and len(space.index.chunks) > 20:
            break
        time.sleep(0.05)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    store = ChunkStore(**options)
    space = store.space("m")
    assert space.match(text(100, 0)).exact_tokens == 100
    for seed in range(100):
        match = space.match(text(100, seed))
        if match.prefix:
            assert torch.equal(space.load(match.prefix.pieces[0].chunk)[0], random_kv(100, seed)[0])
    assert len(space.index.chunks) > 20
    assert store.verify() == 0
    assert store.stats().failures == 0


def test_stats_are_plain_numbers_and_repr_tells():
    store = ChunkStore(codec="gaac")
    put(store.space("m"), text(100, 1))
    stats = store.stats()
    assert stats == replace(stats)
    assert "1 chunks" in repr(store)
    assert "gaac" in repr(store)


SENSELESS = [
    {"codec": "zip"}, {"codec": 7}, {"codec": "int4"}, {"codec": []}, {"keys": None},
    {"keys": {"shape": [3, 2, 99, 16]}}, {"keys": {"shape": [3, 2, 100]}}, {"keys": {"shape": 5}},
    {"keys": {"shape": [3, 2, 2**70, 16]}}, {"keys": {"dtype": "nothing"}},
    {"keys": {"dtype": "nn"}}, {"keys": {"dtype": "int32"}}, {"keys": {"shape": [[], "a"]}},
    {"keys": {"block": {"id": "unknown"}}}, {"keys": {"block": 3}},
]  # fmt: skip


@pytest.mark.parametrize("codec", [None, "gaac", "int8"])
def test_descriptions_that_make_no_sense_are_misses(tmp_path, codec):
    """With a checksum that is right: written so by somebody, or by a release with a bug."""
    ids, salt = text(100, 1), ChunkStore(codec=codec).space("m").salt
    chunk = Chunk.make(salt, root_key(salt, 0), ids, 0)
    tensors, described = pack(tuple(t.to(torch.bfloat16) for t in random_kv(100)), codec)
    for change in SENSELESS:
        keys = change.get("keys", {})
        whole = described | change
        whole["keys"] = described["keys"] | keys if isinstance(keys, dict) else keys
        if "block" in (keys or ()) and codec != "gaac":
            continue  # not looked at
        store = ChunkStore(disk=tmp_path, codec=codec)
        space = store.space("m")
        store.tiers[0].write(space.name, chunk.chain.hex(), to_bytes(chunk, (tensors, whole)))
        assert space.match(ids).exact_tokens == 100
        assert space.load(chunk) is None, change
        assert space.match(ids).exact_tokens == 0
        assert (store.stats().chunks, store.stats().bytes) == (0, 0)
        store.clear()


def test_descriptions_that_are_no_objects_are_misses(tmp_path):
    store = ChunkStore(disk=tmp_path)
    space = store.space("m")
    chunk = Chunk.make(space.salt, root_key(space.salt, 0), text(100, 1), 0)
    for described in (5, [], None, "x"):
        data = to_bytes(chunk, (pack(random_kv(100), None)[0], described))
        store.tiers[0].write(space.name, chunk.chain.hex(), data)
        assert space.load(chunk) is None, described
        assert list(tmp_path.glob("*/*.safetensors")) == []


@pytest.mark.parametrize("lossy", ["int8", "int4"])
def test_a_lossy_file_never_passes_for_an_exact_one(tmp_path, lossy):
    store = ChunkStore(disk=tmp_path)
    space = store.space("m")
    chunk = Chunk.make(space.salt, root_key(space.salt, 0), text(100, 1), 0)
    data = to_bytes(chunk, pack(random_kv(100), lossy))
    store.tiers[0].write(space.name, chunk.chain.hex(), data)
    assert space.match(chunk.ids).exact_tokens == 100
    assert space.load(chunk) is None
    assert store.stats().damaged == 1
    assert list(tmp_path.glob("*/*.safetensors")) == []


def test_states_that_are_no_floats_are_a_miss(tmp_path):
    store = ChunkStore(disk=tmp_path)
    space = store.space("m")
    chunk = Chunk.make(space.salt, root_key(space.salt, 0), text(100, 1), 0)
    data = to_bytes(chunk, pack(tuple(t.int() for t in random_kv(100)), None))
    store.tiers[0].write(space.name, chunk.chain.hex(), data)
    assert space.match(chunk.ids).exact_tokens == 100
    assert space.load(chunk) is None
    assert store.stats().damaged == 1
