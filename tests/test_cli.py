"""The demo as a user runs it: a real subprocess, real output."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_kvcodecs import ChunkStore

from .store.test_store import put, text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_kvcodecs.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_demo_shows_identical_tokens_and_a_smaller_cache():
    done = run("demo", "--tokens", "400", "--new-tokens", "8")
    assert done.returncode == 0, done.stderr
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:4]
        for line in done.stdout.splitlines()
        if line[:1] == "│"
    }
    assert rows["tokens identical"][1].strip() == "yes"
    assert float(rows["times smaller"][1]) > 1.3
    assert float(rows["bits per number (packed blocks)"][1]) < 11.5
    assert "ms" in rows["time per step (median)"][1]
    assert "GAACCache: prompt" in done.stderr, "no progress bar"


def test_store_lists_and_verifies_a_folder(tmp_path):
    put(ChunkStore(disk=tmp_path).space("m"), text(250, 1))
    listed = run("store", str(tmp_path))
    assert listed.returncode == 0, listed.stderr
    assert "│ 3      │ 250" in listed.stdout
    file = next(tmp_path.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert run("store", str(tmp_path), "--verify", "--clear").returncode == 1
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize(("arguments", "message"), [
    (["store", "/no/such/folder"], "no such folder"),
    (["demo", "--model", "/no/such/folder"], "hf-kvcodecs: "),
    (["demo", "--tokens", "0"], "expected a number of at least 1"),
    (["demo", "--colour", "red"], "unrecognized arguments"),
    ([], "required"),
], ids=str)  # fmt: skip
def test_mistakes_get_one_line_and_status_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
