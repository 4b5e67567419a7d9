"""Where chunks go beside memory: a folder, any fsspec filesystem, Redis. Each keeps named bytes.

A tier is a cache: what it loses is a miss, and a failure of its medium is one too (the store counts
it and goes on).
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

SUFFIX = ".safetensors"
# What stores call their spaces and chunks: whatever else lies there is not theirs to remove.
SPACE = re.compile("[0-9a-f]{32}")
FILE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
PARTIAL = re.compile(r"\.([0-9a-f]{64}\.\d+\.[0-9a-f]{8}|[a-z0-9_]{8}\.partial)")
STALE_SECONDS = 3600.0  # a file this long in writing has lost its writer


class TierError(OSError):
    """The medium failed: a full disk, a server that does not answer."""


class Tier(Protocol):
    """Named bytes, grouped by ``space`` (hex, one per model and namespace)."""

    def names(self, space: str) -> set[str]:
        """The names there are; may be slightly out of date."""
        ...

    def head(self, space: str, name: str, count: int) -> bytes | None:
        """The first ``count`` bytes; None if there is no such name."""
        ...

    def read(self, space: str, name: str) -> bytes | None:
        """All bytes; None if there is no such name."""
        ...

    def write(self, space: str, name: str, data: bytes) -> None:
        """Keeps ``data``, wholly or not at all, whoever else writes."""
        ...

    def remove(self, space: str, name: str) -> None:
        """Forgets a name; fine if there is none."""
        ...

    def clear(self, spaces: str = "") -> None:
        """Forgets every name of every space whose own name begins with ``spaces``."""
        ...


class DiskTier:
    """A folder that many processes may share: files are renamed into place when complete.

    Args:
        folder: made if missing. Other files in it are left alone.
        max_bytes: files not read for longest go when there are more, whoever wrote them.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self.folder, self.max_bytes = Path(folder), max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def names(self, space: str) -> set[str]:
        return {file.name.removesuffix(SUFFIX) for file in self._files(space)}

    def head(self, space: str, name: str, count: int) -> bytes | None:
        try:
            with open(self._path(space, name), "rb") as file:
                return file.read(count)
        except FileNotFoundError:
            return None

    def read(self, space: str, name: str) -> bytes | None:
        path = self._path(space, name)
        try:
            data = path.read_bytes()
            if self.max_bytes is not None:
                os.utime(path)  # the order in which files go
        except FileNotFoundError:
            return None
        return data

    def write(self, space: str, name: str, data: bytes) -> None:
        path = self._path(space, name)
        path.parent.mkdir(exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        self._keep_bound()

    def remove(self, space: str, name: str) -> None:
        self._path(space, name).unlink(missing_ok=True)

    def clear(self, spaces: str = "") -> None:
        for file in list(self._files(spaces)):
            Path(file.path).unlink(missing_ok=True)

    def _files(self, spaces: str = "", kind: re.Pattern[str] = FILE) -> Iterator[os.DirEntry[str]]:
        """The chunks of every space whose name begins with ``spaces``."""
        for folder in os.listdir(self.folder):
            if not SPACE.fullmatch(folder) or not folder.startswith(spaces):
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with os.scandir(self.folder / folder) as entries:
                    yield from (entry for entry in entries if kind.fullmatch(entry.name))

    def _sweep(self) -> None:
        """Removes what writers that were killed left behind."""
        for file in list(self._files(kind=PARTIAL)):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > STALE_SECONDS:
                    os.unlink(file.path)

    def _path(self, space: str, name: str) -> Path:
        return self.folder / space / f"{name}{SUFFIX}"

    def _keep_bound(self) -> None:
        """Removes what is too much. Others write here too, so that only a look tells."""
        if self.max_bytes is None:
            return
        files = []
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                files.append((status.st_mtime_ns, status.st_size, file.path))
        held = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if held <= self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            held -= size


class FsspecTier:
    """Any fsspec filesystem: ``s3://bucket/folder``, ``gs://...``, ``memory://...``.

    Objects are written in one go (object stores) or renamed into place (file systems).
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(f"remote={url!r} needs fsspec: pip install fsspec") from error
        self.filesystem, self.root = fsspec.core.url_to_fs(url)

    def names(self, space: str) -> set[str]:
        files = self._listed(self._folder(space))
        for name in files:
            if PARTIAL.fullmatch(name):
                self._sweep(f"{self._folder(space)}/{name}")
        return {name.removesuffix(SUFFIX) for name in files if FILE.fullmatch(name)}

    def head(self, space: str, name: str, count: int) -> bytes | None:
        try:
            data: bytes = self.filesystem.cat_file(self._path(space, name), start=0, end=count)
        except FileNotFoundError:
            return None
        return data

    def read(self, space: str, name: str) -> bytes | None:
        try:
            data: bytes = self.filesystem.cat_file(self._path(space, name))
        except FileNotFoundError:
            return None
        return data

    def write(self, space: str, name: str, data: bytes) -> None:
        self.filesystem.makedirs(self._folder(space), exist_ok=True)
        partial = f"{self._folder(space)}/.{name}.{os.getpid()}.{os.urandom(4).hex()}"
        self.filesystem.pipe_file(partial, data)
        self.filesystem.mv(partial, self._path(space, name))

    def remove(self, space: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self._path(space, name))

    def clear(self, spaces: str = "") -> None:
        for folder in self._listed(self.root):
            if SPACE.fullmatch(folder) and folder.startswith(spaces):
                for name in self._listed(self._folder(folder)):
                    if FILE.fullmatch(name):
                        self.remove(folder, name.removesuffix(SUFFIX))

    def _sweep(self, path: str) -> None:
        """Removes what a writer that was killed left behind, where the filesystem tells its age."""
        with contextlib.suppress(FileNotFoundError, NotImplementedError):
            written = self.filesystem.modified(path)
            if time.time() - written.timestamp() > STALE_SECONDS:
                self.filesystem.rm_file(path)

    def _listed(self, folder: str) -> list[str]:
        try:
            self.filesystem.invalidate_cache(folder)
            found = self.filesystem.ls(folder, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def _folder(self, space: str) -> str:
        return f"{self.root}/{space}"

    def _path(self, space: str, name: str) -> str:
        return f"{self._folder(space)}/{name}{SUFFIX}"


class RedisTier:
    """A Redis or Valkey server that many machines share.

    Keys ``hf_kvcodecs:SPACE:NAME`` hold the bytes, the set ``hf_kvcodecs:SPACE`` the names. Set the
    server's ``maxmemory`` and an eviction policy to bound it: what it evicts is a miss here.
    """

    PREFIX = "hf_kvcodecs"

    def __init__(self, url: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(f"remote={url!r} needs redis-py: pip install redis") from error
        self._errors = redis.RedisError
        # Once more at once, for a connection that the server has closed; a dead one is left alone.
        retry = Retry(NoBackoff(), 1)
        self.client: Any = redis.Redis.from_url(
            url, socket_timeout=10, socket_connect_timeout=3, retry=retry
        )

    def names(self, space: str) -> set[str]:
        return {name.decode() for name in self._do("smembers", self._set(space))}

    def head(self, space: str, name: str, count: int) -> bytes | None:
        data: bytes = self._do("getrange", self._key(space, name), 0, count - 1)
        return self._known(space, name, data or None)

    def read(self, space: str, name: str) -> bytes | None:
        return self._known(space, name, self._do("get", self._key(space, name)))

    def write(self, space: str, name: str, data: bytes) -> None:
        self._do("set", self._key(space, name), data)
        self._do("sadd", self._set(space), name)  # after the bytes: a listed name has them

    def remove(self, space: str, name: str) -> None:
        self._do("srem", self._set(space), name)
        self._do("delete", self._key(space, name))

    def clear(self, spaces: str = "") -> None:
        try:
            for key in self.client.scan_iter(f"{self.PREFIX}:{spaces}*"):
                self.client.delete(key)
        except self._errors as error:
            raise TierError(f"Redis: {error}") from error

    def _known(self, space: str, name: str, data: bytes | None) -> bytes | None:
        if data is None:  # evicted by the server
            self._do("srem", self._set(space), name)
        return data

    def _set(self, space: str) -> str:
        return f"{self.PREFIX}:{space}"

    def _key(self, space: str, name: str) -> str:
        return f"{self.PREFIX}:{space}:{name}"

    def _do(self, command: str, *arguments: Any) -> Any:
        try:
            return getattr(self.client, command)(*arguments)
        except self._errors as error:
            raise TierError(f"Redis: {command} failed: {error}") from error


def remote_tier(url: str) -> Tier:
    """The tier that ``remote=`` names."""
    if "://" not in url:
        raise ValueError(
            f"remote: expected a URL such as redis://host:6379/0 or s3://bucket/folder, got {url!r}"
        )
    scheme = url.split("://", 1)[0]
    return RedisTier(url) if scheme in ("redis", "rediss", "unix", "valkey") else FsspecTier(url)
