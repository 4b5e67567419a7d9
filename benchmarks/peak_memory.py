"""Bytes allocated over time, from the profiler's memory events; used by ``decode_cpu.py --memory``.

Counts what passes through torch's CPU allocator, which is every tensor. Scratch memory that a
library (oneDNN, OpenMP) takes for itself is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "measured from here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocation (``size`` above 0) or a free (below 0), and the operation it belongs to."""

    time_ns: int
    size: int
    address: int
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which most bytes were held.

    Attributes:
        before: bytes that the set-up had left.
        bytes: bytes held at the peak, those of the set-up included.
        by_operation: of what was allocated after the set-up, bytes held at the peak.
    """

    before: int
    bytes: int
    by_operation: dict[str, int]


def peak_of(set_up: Callable[[], Any], function: Callable[[Any], None]) -> Peak:
    """Runs ``function(set_up())`` and reports the most bytes held while ``function`` ran.

    The set-up is profiled as well: the profiler overlooks frees of what it has not seen allocated.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        subject = set_up()
        with record_function(MARK):
            pass
        function(subject)
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    start_ns = next(node.start_time_ns for node in tree if node.name == MARK)
    events = sorted(_allocations(tree, None), key=lambda event: event.time_ns)
    before = held = sum(event.size for event in events if event.time_ns < start_ns)
    during = [event for event in events if event.time_ns >= start_ns]
    peak, peak_idx = held, 0
    for idx, event in enumerate(during, start=1):
        held += event.size
        if held > peak:
            peak, peak_idx = held, idx
    return Peak(before=before, bytes=peak, by_operation=_held(during[:peak_idx]))


def _allocations(nodes: Any, outermost: str | None) -> Iterator[Allocation]:
    """Every allocation and free in a tree of profiler events."""
    for node in nodes:
        if node.name == "[memory]":
            size, address = node.extra_fields.alloc_size, node.extra_fields.ptr
            yield Allocation(
                time_ns=node.start_time_ns,
                size=size,
                address=address,
                operation=outermost or "other",
            )
        yield from _allocations(node.children, outermost or node.name)


def _held(events: list[Allocation]) -> dict[str, int]:
    """Bytes allocated in ``events`` and not freed again, per operation, largest first."""
    alive: dict[int, Allocation] = {}
    for event in events:
        if event.size > 0:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    total: Counter[str] = Counter()
    for event in alive.values():
        total[event.operation] += event.size
    return dict(total.most_common())
