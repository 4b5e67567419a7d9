"""Seconds between two points of what a device was given to do, without having it wait."""

from __future__ import annotations

import time

import torch


class Mark:
    """A point in what ``device`` is given to do: on a CUDA device where its current stream is when
    it gets there."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Mark) -> float:
        """Waits until this point is reached."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
