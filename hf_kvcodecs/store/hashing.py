"""Names of chunks: keyed cryptographic hashes of token ids, and the probes that find candidates.

Every hash is BLAKE2b keyed with a *salt* made of the model's identity and the store's namespace:
two models or two tenants share no name, and nobody can guess another tenant's names from a text
(the timing side channel of CVE-2025-46570).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

PROBE_TOKENS = 16  # tokens whose rolling hash proposes a place in a chunk
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never vanish modulo 2**64


def space_salt(identity: str, namespace: str) -> bytes:
    """The 32-byte key of every hash for one model (``identity``) in one ``namespace``."""
    digest = hashlib.sha256(b"hf_kvcodecs chunk store 1")
    for part in (identity, namespace):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def namespace_name(namespace: str) -> str:
    """What the names of all spaces of a namespace begin with: 16 hex digits."""
    return hashlib.sha256(b"hf_kvcodecs namespace 1" + namespace.encode()).hexdigest()[:16]


def root_key(salt: bytes, position: int) -> bytes:
    """The parent of a text's first chunk, whose first token has this position."""
    return _keyed(salt, b"root", position.to_bytes(8, "little", signed=True))


def content_key(salt: bytes, ids: Ids) -> bytes:
    """The name of a text wherever it stands."""
    return _keyed(salt, b"content", _bytes(ids))


def chain_key(salt: bytes, parent: bytes, ids: Ids) -> bytes:
    """The name of a text behind everything that ``parent`` names."""
    return _keyed(salt, b"chain", parent + _bytes(ids))


def branch_key(salt: bytes, parent: bytes, nonce: bytes) -> bytes:
    """A parent that no prompt leads to: for chunks whose context was reused approximately."""
    return _keyed(salt, b"branch", parent + nonce)


def probe_hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """The rolling hash of the ``PROBE_TOKENS`` tokens from each offset on; empty for shorter texts.

    A polynomial modulo 2**64: cheap, and only a proposal. Token ids are compared before any use.
    """
    if len(ids) < PROBE_TOKENS:
        return np.empty(0, np.uint64)
    words = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(32)
    hashes = np.zeros(len(ids) - PROBE_TOKENS + 1, np.uint64)
    for offset in range(PROBE_TOKENS):
        hashes = hashes * _BASE + words[offset : offset + len(hashes)]
    return hashes


def common_prefix(left: Ids, right: Ids) -> int:
    """How many tokens both begin with."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def common_suffix(left: Ids, right: Ids) -> int:
    """How many tokens both end with."""
    return common_prefix(left[::-1], right[::-1])


def _bytes(ids: Ids) -> bytes:
    return ids.astype("<i8").tobytes()


def _keyed(salt: bytes, purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=salt, person=purpose, digest_size=32).digest()
