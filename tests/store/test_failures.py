"""A store whose disk, server, files or caches fail: misses with one notice, never wrong."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hf_kvcodecs import ChunkStore
from hf_kvcodecs.store.files import from_bytes, to_bytes
from hf_kvcodecs.store.lock import StoreLock
from hf_kvcodecs.store.packing import pack

from .test_matching import random_kv, text
from .test_store import CHUNK_BYTES, put

SENSELESS = {
    "shape": lambda described: described["keys"].update(shape=[1, 2, 3, 4]),
    "dtype": lambda described: described["keys"].update(dtype="no_grad"),
    "codec": lambda described: described.update(codec="gaac"),
    "codec of no kind": lambda described: described.update(codec=7),
    "nothing": lambda described: described.clear(),
}


@pytest.mark.parametrize("name", [*SENSELESS, "fewer tokens"])
def test_a_file_whose_description_makes_no_sense_is_a_miss(tmp_path, name):
    """Its checksum is right: whoever wrote it was wrong."""
    ids = text(100, 1)
    chunk = put(ChunkStore(disk=tmp_path).space("m"), ids)[0]
    file = next(tmp_path.glob("*/*.safetensors"))
    packed = pack(random_kv(100 if name in SENSELESS else 60), None)
    SENSELESS.get(name, lambda _: None)(packed[1])
    file.write_bytes(to_bytes(chunk, packed))
    store = ChunkStore(disk=tmp_path)
    space = store.space("m")
    from_bytes(space.salt, chunk.chain, file.read_bytes())
    assert space.load(space.match(ids).prefix.pieces[0].chunk) is None
    assert not file.exists()
    stats = store.stats()
    assert (stats.damaged, stats.misses, stats.chunks, stats.bytes) == (1, 1, 0, 0)
    assert space.match(ids).prefix is None


def test_tokens_that_found_no_room_are_not_stored(tmp_path):
    ids, kv = text(100, 1), random_kv(100)
    assert put_tokens(ChunkStore(max_bytes=1000), ids, kv) == 0
    assert put_tokens(ChunkStore(max_bytes=1000, disk=tmp_path), ids, kv) == 100
    assert put_tokens(ChunkStore(max_bytes=1000, disk=tmp_path), ids, kv) == 0
    assert put_tokens(ChunkStore(), ids, kv) == 100


def put_tokens(store, ids, kv):
    space = store.space("m")
    space.match(ids)
    made = put(ChunkStore().space("m"), ids, kv)[0]
    return space.put([(made, lambda: kv)])


class FailingFileSystem(MemoryFileSystem):
    """A driver with errors of its own, as those of object stores have."""

    protocol = "failing"

    class HttpError(Exception):
        pass

    def ls(self, *args, **kwargs):
        raise self.HttpError("503")

    cat_file = pipe_file = makedirs = ls


def test_errors_of_a_driver_are_misses_with_one_notice(caplog):
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    store = ChunkStore(remote="failing://bucket", max_bytes=2 * CHUNK_BYTES)
    space = store.space("m")
    for seed in range(6):
        put(space, text(100, seed))
        time.sleep(0.01)
    assert space.match(text(100, 5)).exact_tokens == 100
    first = space.match(text(100, 0)).prefix
    assert first is None or space.load(first.pieces[0].chunk) is None  # evicted, never written
    assert store.verify() == 0
    store.clear()
    assert store.stats().failures >= 2
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1


def test_a_server_that_does_not_answer_costs_one_timeout():
    """It takes connections and says nothing, as a machine under load or a firewall does."""
    pytest.importorskip("redis")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0?socket_timeout=0.3"
        store = ChunkStore(remote=url)
        space = store.space("m")
        began = time.monotonic()
        ids = text(3000, 1)
        put(space, ids)
        assert space.match(ids).exact_tokens == 3000
        assert time.monotonic() - began < 3
        assert store.stats().failures == 1


@pytest.mark.parametrize("kind", ["disk", "fsspec"])
def test_what_killed_writers_left_is_swept(tmp_path, kind):
    options = {"disk": tmp_path} if kind == "disk" else {"remote": f"file://{tmp_path}"}
    ids = text(100, 1)
    put(ChunkStore(**options).space("m"), ids)
    folder = next(tmp_path.iterdir())
    name = next(folder.iterdir()).stem
    left = ".ab1_c2d3.partial" if kind == "disk" else f".{name}.123.0123abcd"
    old, new, others = folder / left, folder / left.replace("a", "e"), folder / ".mine.partial"
    for file in (old, new, others):
        file.write_bytes(b"half")
    for file in (old, others):
        os.utime(file, (time.time() - 7200,) * 2)
    store = ChunkStore(**options)
    assert store.space("m").match(ids).exact_tokens == 100
    assert not old.exists()
    assert new.exists()
    assert others.exists()


def test_a_newer_file_is_told_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_kvcodecs.store.space.REFRESH_SECONDS", 0.0)
    ids = text(100, 1)
    put(ChunkStore(disk=tmp_path).space("m"), ids)
    file = next(tmp_path.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b'"version":"1"', b'"version":"9"'))
    space = ChunkStore(disk=tmp_path).space("m")
    for _ in range(3):
        assert space.match(ids).prefix is None
    assert len(caplog.records) == 1
    assert file.exists()


@pytest.mark.parametrize("tier", ["disk", "fsspec", "redis"])
def test_clear_leaves_other_namespaces_alone(tmp_path, tier, request):
    url = request.getfixturevalue("redis_url") if tier == "redis" else f"file://{tmp_path}"
    options = {"disk": tmp_path} if tier == "disk" else {"remote": url}
    ids = text(100, 1)
    for namespace in ("one", "two"):
        put(ChunkStore(**options, namespace=namespace).space("m"), ids)
    ChunkStore(**options, namespace="one").clear()  # a new process: it has opened no space
    exact = [
        ChunkStore(**options, namespace=namespace).space("m").match(ids).exact_tokens
        for namespace in ("one", "two")
    ]
    assert exact == [0, 100]
    ChunkStore(**options, namespace="two").clear()


def test_what_happens_inside_the_lock_waits_for_its_end():
    lock, done = StoreLock(), []
    lock.soon(lambda: done.append("at once"))
    with lock:
        with lock:
            lock.soon(lambda: done.append("later"))
            thread = threading.Thread(target=lambda: lock.soon(lambda: done.append("another's")))
            thread.start()
            thread.join(20)
        assert done == ["at once", "another's"]
    assert done == ["at once", "another's", "later"]
    with lock:
        lock.soon(lambda: 1 / 0)  # told, and nobody else's business
