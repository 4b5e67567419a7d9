"""One draft step of fixed shape, captured as a CUDA graph on GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..caches.compat import CACHE_ARGUMENT, notice_once
from ..caches.draft import DraftLayer, StaticStep
from ..caches.speculative import SpeculativeKVCache
from ..caches.traced_drafts import TracedDrafts, drafting
from .inputs import RowInputs

WARM_UP_STEPS = 2


class DraftStep:
    """Reads one token on the draft face with the same kernels on the same memory each time.

    On a GPU they are captured once as a CUDA graph and replayed: an eager step of a large model is
    bound by Python. Elsewhere they are run as they are.

    Args:
        inputs: calls the model on the row; its cache has a draft face, and stays turned to it.
            With the cache's ``compile_drafts`` the model's step is compiled first, once per model.

    A step belongs to the draft layers that it was made for: :attr:`valid` tells whether they are
    still the cache's.
    """

    def __init__(self, inputs: RowInputs) -> None:
        self.inputs = inputs
        self._drafts = _drafts(self.cache)
        device = self.cache.own_layers[0].device
        self.static = StaticStep.allocate(self._drafts[0].capacity, device)
        with torch.inference_mode(False):
            self.ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
            self.positions = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.compiled = _compiled(inputs) if self.cache.compile_drafts else None
        if self.compiled is not None:
            with torch.inference_mode(False):
                self.mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
            self.traced = TracedDrafts(len(self._drafts))
        self.logits: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture(device)

    @property
    def cache(self) -> SpeculativeKVCache:
        """The row's cache."""
        cache: SpeculativeKVCache = self.inputs.cache
        return cache

    @property
    def valid(self) -> bool:
        """Whether the cache's draft layers are those of this step, with room for one token."""
        now = _drafts(self.cache)
        same = len(now) == len(self._drafts) and all(
            ours is theirs for ours, theirs in zip(self._drafts, now, strict=True)
        )
        return same and now[0].tail_tokens < now[0].capacity == self.static.tail_bias.shape[0]

    def _capture(self, device: torch.device) -> None:
        self.static.cursor.fill_(self._drafts[0].tail_tokens)
        self.positions.fill_(self.cache.get_seq_length() + self.inputs.shift)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._run()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        if self.compiled is not None and self._run_compiled(self.compiled):
            return
        self.cache.faces.static = self.static
        try:
            self.static.refresh()
            options: dict[str, Any] = {CACHE_ARGUMENT: self.cache}
            if self.inputs.takes_positions:
                options["position_ids"] = self.positions
            out = self.inputs.model(self.ids, use_cache=True, return_dict=True, **options)
            self.logits = out.logits[:, -1:]
        finally:
            self.cache.faces.static = None

    def _run_compiled(self, step: Callable[..., torch.Tensor]) -> bool:
        """Whether the compiled step ran; where that is impossible, it is said once."""
        try:
            with drafting(self._drafts, self.static):
                self.static.refresh()
                self.logits = step(self.ids, self.positions, self.mask, self.traced)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Dynamo's and Inductor's errors have no common class
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            notice_once(
                f"compile_drafts: {type(self.inputs.model).__name__} could not be compiled "
                f"({type(error).__name__}: {reason}). Its draft steps are run as they are."
            )
            self.compiled = _compiled_steps[self.inputs.model] = None
        return self.compiled is not None

    def __call__(self, token: torch.Tensor, start: int) -> torch.Tensor:
        """Logits ``[1, 1, vocab]`` behind ``token`` ``[1, 1]``, the row's ``start``-th (padding
        counted); a copy."""
        self.ids.copy_(token)
        self.positions.fill_(start + self.inputs.shift)
        self.static.cursor.fill_(self._drafts[0].tail_tokens)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run()
        for layer in self.cache.own_layers:
            layer.advance(1)
        assert self.logits is not None
        return self.logits.clone()


# By model; None for those that cannot be compiled.
_compiled_steps: weakref.WeakKeyDictionary[Any, Callable[..., torch.Tensor] | None] = (
    weakref.WeakKeyDictionary()
)


def _compiled(inputs: RowInputs) -> Callable[..., torch.Tensor] | None:
    """The model's step over one drafted token as one compiled graph, made at its first call; None
    where positions cannot be given to the model."""
    if not inputs.takes_positions:
        notice_once(
            f"compile_drafts: {type(inputs.model).__name__} takes no position_ids; its draft steps "
            "are not compiled."
        )
        return None
    if inputs.model not in _compiled_steps:
        model = weakref.ref(inputs.model)

        def step(
            ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: TracedDrafts
        ) -> torch.Tensor:
            # A mask of four dimensions is taken as it is: no model makes one of its own.
            held: Any = model()
            out = held(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                return_dict=True,
                **{CACHE_ARGUMENT: cache},
            )
            logits: torch.Tensor = out.logits
            return logits[:, -1:]

        _compiled_steps[inputs.model] = torch.compile(step, fullgraph=True, dynamic=False)
    return _compiled_steps[inputs.model]


def _drafts(cache: SpeculativeKVCache) -> list[DraftLayer]:
    return [layer.draft for layer in cache.own_layers if layer.draft is not None]
