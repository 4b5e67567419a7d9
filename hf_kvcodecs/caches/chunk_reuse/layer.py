"""A layer that can be given rows out of order: the recomputed ones go to their places."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class ScatterLayer(DynamicLayer):
    """A :class:`DynamicLayer` that, for one forward pass, takes its states for given columns.

    Outside of such a pass it is a DynamicLayer in all it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.columns: torch.Tensor | None = None
        self.held = 0

    def fill(
        self, keys: torch.Tensor, values: torch.Tensor, columns: torch.Tensor, held: int
    ) -> None:
        """Takes ``keys`` and ``values`` ``[batch, kv_heads, tokens, head_dim]`` as its own.

        The next update writes its states into ``columns`` (int64 ``[batch, rows]``), which may name
        a column twice if its states are the same. Until then ``held`` tokens count as present.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values, self.columns, self.held = keys, values, columns, held

    def get_seq_length(self) -> int:
        return self.held if self.columns is not None else super().get_seq_length()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns, self.columns = self.columns, None
        if columns is None:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None
        assert self.values is not None
        write(self.keys, columns, key_states)
        write(self.values, columns, value_states)
        return self.keys, self.values

    def __repr__(self) -> str:
        return f"ScatterLayer({self.get_seq_length()} tokens)"


def write(states: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
    """Puts ``rows`` ``[batch, kv_heads, rows, head_dim]`` into ``columns`` of ``states``."""
    if len(columns) == 1:
        states.index_copy_(2, columns[0], rows)
    else:
        index = columns[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
        states.scatter_(2, index, rows)
