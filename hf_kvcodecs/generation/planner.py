"""What drafting on a compressed cache will give on some machine, before it is built: arithmetic.

After VeriCache (arXiv 2605.17613), corrected where its printed figures contradict its own model: a
drafted token needs a forward of its own, so a request gets ``(a + 1) / (x + 1)`` tokens per
iteration (the paper's review prints ``1 + gamma x / (x + 1)``, more than one a forward, hence its
312 tokens/s for Mistral-24B where these formulas give 149); and the ratio where link and memory
bind alike is ``rho / x - 1 / x - M / (B KV)``, below which the link binds.

Bytes and seconds throughout; ``x`` is the draft length, ``a`` the mean accepted length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One setting and what follows from it. ``throughput`` and ``request_throughput`` are tokens
    per second of all requests and of one.

    Attributes:
        memory_bytes_read: bytes that the accelerator's memory gives per iteration.
        link_bytes: bytes that cross the link per iteration.
        memory_seconds, link_seconds: what these take.
        tokens_per_iteration: of one request.
        link_limit: tokens per second that the link allows, whatever the batch and the ratio.
        critical_ratio: the compression ratio below which the link binds (may be negative).
        peak_bytes: weights, draft faces and the exact faces in flight, if verifications are
            staggered.
        lockstep_peak_bytes: the same if all requests verify at once.
        plain_throughput: of a full cache on the accelerator, with the batch that fits in
            ``capacity_bytes``; None if no capacity was given.
        plain_batch: that batch.
    """

    memory_bytes_read: float
    link_bytes: float
    memory_seconds: float
    link_seconds: float
    tokens_per_iteration: float
    throughput: float
    request_throughput: float
    link_limit: float
    critical_ratio: float
    peak_bytes: float
    lockstep_peak_bytes: float
    plain_throughput: float | None
    plain_batch: int | None

    @property
    def iteration_seconds(self) -> float:
        """Memory and link work side by side: the slower one."""
        return max(self.memory_seconds, self.link_seconds)

    @property
    def bound(self) -> str:
        """ "memory" or "link"."""
        return "memory" if self.memory_seconds >= self.link_seconds else "link"


def plan(
    *,
    weight_bytes: float,
    kv_bytes: float,
    ratio: float,
    draft_length: int,
    accepted: float,
    batch: int,
    memory_bandwidth: float,
    link_bandwidth: float,
    capacity_bytes: float | None = None,
    link_ratio: float = 1.0,
) -> Plan:
    """The throughput of long-context decoding with staggered verifications.

    Args:
        weight_bytes: of the model.
        kv_bytes: of one request's exact face.
        ratio: draft face / exact face, in (0, 1].
        draft_length: tokens drafted between verifications.
        accepted: mean accepted tokens of a draft, 0 .. ``draft_length``.
        batch: requests.
        memory_bandwidth, link_bandwidth: bytes per second.
        capacity_bytes: the accelerator's memory.
        link_ratio: bytes that cross the link / ``kv_bytes``: 0.71 with ``full_codec="gaac"``.

    Raises:
        ValueError: an argument out of range.
    """
    positive = {
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "batch": batch,
        "draft_length": draft_length,
        "memory_bandwidth": memory_bandwidth,
        "link_bandwidth": link_bandwidth,
        "link_ratio": link_ratio,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}: expected a positive number, got {value!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio: expected a part in (0, 1], got {ratio!r}")
    if not 0 <= accepted <= draft_length:
        raise ValueError(f"accepted: expected 0 to draft_length ({draft_length}), got {accepted!r}")
    read = weight_bytes + batch * kv_bytes * (ratio + 1 / draft_length)
    moved = batch * kv_bytes * link_ratio / draft_length
    memory_seconds, link_seconds = read / memory_bandwidth, moved / link_bandwidth
    tokens = (accepted + 1) / (draft_length + 1)
    rate = tokens / max(memory_seconds, link_seconds)
    resident = weight_bytes + batch * ratio * kv_bytes
    plain_batch = plain = None
    if capacity_bytes is not None:
        plain_batch = max(math.floor((capacity_bytes - weight_bytes) / kv_bytes), 0)
        plain_read = weight_bytes + plain_batch * kv_bytes
        plain = plain_batch * memory_bandwidth / plain_read
    return Plan(
        memory_bytes_read=read,
        link_bytes=moved,
        memory_seconds=memory_seconds,
        link_seconds=link_seconds,
        tokens_per_iteration=tokens,
        throughput=batch * rate,
        request_throughput=rate,
        link_limit=link_bandwidth / (kv_bytes * link_ratio) * (accepted + 1),
        critical_ratio=critical_ratio(
            weight_bytes, kv_bytes, draft_length, batch, memory_bandwidth / link_bandwidth
        ),
        peak_bytes=resident + kv_bytes,
        lockstep_peak_bytes=resident + batch * kv_bytes,
        plain_throughput=plain,
        plain_batch=plain_batch,
    )


def critical_ratio(
    weight_bytes: float, kv_bytes: float, draft_length: int, batch: int, rho: float
) -> float:
    """The compression ratio where memory and link take the same time; ``rho`` is the memory's
    bandwidth over the link's."""
    return (rho - 1) / draft_length - weight_bytes / (batch * kv_bytes)


def lockstep_peak_as_printed(weight_bytes: float, kv_bytes: float, batch: int) -> float:
    """The paper's own figure for lock-step verification, which leaves the draft faces out."""
    return weight_bytes + batch * kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One request alone, one round: drafting, then what of the transfer drafting did not hide.

    Attributes:
        draft_seconds: of all drafted tokens.
        transfer_seconds: of the exact face over the link.
        hidden_seconds: of the transfer, behind drafting.
        verify_seconds: of the forward itself.
    """

    draft_seconds: float
    transfer_seconds: float
    hidden_seconds: float
    verify_seconds: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Of the round."""
        waiting = self.transfer_seconds - self.hidden_seconds
        return self.draft_seconds + max(waiting, self.verify_seconds)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def plan_round(
    *,
    draft_step_seconds: float,
    verify_seconds: float,
    kv_bytes: float,
    link_bandwidth: float,
    draft_length: int,
    accepted: float,
    staging_bytes: float = 0.0,
    link_ratio: float = 1.0,
) -> RoundPlan:
    """What a single request gets when its exact face crosses the link for each verification.

    ``staging_bytes`` of the exact face (as the model reads it) arrive while drafts are made, the
    rest while the verification runs, layer by layer. Arguments as for :func:`plan`.
    """
    transfer = kv_bytes * link_ratio / link_bandwidth
    draft = draft_length * draft_step_seconds
    hidden = min(draft, transfer * min(staging_bytes / kv_bytes, 1.0))
    return RoundPlan(
        draft_seconds=draft,
        transfer_seconds=transfer,
        hidden_seconds=hidden,
        verify_seconds=verify_seconds,
        tokens=accepted + 1,
    )


def remote_request_seconds(
    *,
    kv_bytes: float,
    ratio: float,
    slow_bandwidth: float,
    fast_bandwidth: float,
    tokens: int,
    draft_length: int,
    accepted: float,
    decode_seconds: float,
    verify_seconds: float,
) -> float:
    """Seconds of one request whose compressed cache crosses a slow link to a remote drafter, while
    a verifier near the exact one loads it over a fast link: the start, then
    ``tokens / accepted`` cycles of drafting beside loading and verifying."""
    cycle = max(draft_length * decode_seconds, kv_bytes / fast_bandwidth + verify_seconds)
    return ratio * kv_bytes / slow_bandwidth + tokens / accepted * cycle
