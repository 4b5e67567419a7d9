"""Arguments of a forward call over chosen rows only, wherever they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .assembly import Flags
from .prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """The chosen tokens of a batch.

    Args:
        columns: int64 ``[batch, rows]``, ascending. Batch rows with fewer tokens begin with their
            first one again and again: computed alike, written to the same place.
        input_ids: their ids, the same shape.
        position_ids: their positions.
        mask: ``[batch, 1, rows, columns]``, who sees whom: by position, padding hidden.
    """

    columns: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.mask,
        }


def layout(
    prompt: Prompt,
    wanted: list[Flags],
    ids: torch.Tensor,
    needs_float_mask: bool,
    dtype: torch.dtype,
) -> RowPlan:
    """The plan to compute, for each row, the tokens flagged in ``wanted``.

    Args:
        prompt: what ``ids`` was read as.
        wanted: bool ``[tokens]`` for each row, at least one True.
        ids: the whole prompt ``[batch, columns]``, on the model's device.
        needs_float_mask: eager attention adds the mask; sdpa takes booleans.
        dtype: of such a mask.
    """
    chosen = [np.flatnonzero(flags) + pad for flags, pad in zip(wanted, prompt.pads, strict=True)]
    rows = max(len(places) for places in chosen)
    host = np.stack(
        [np.concatenate([places[:1].repeat(rows - len(places)), places]) for places in chosen]
    )
    first = torch.tensor([[p - pad] for p, pad in zip(prompt.positions, prompt.pads, strict=True)])
    pads = torch.tensor(prompt.pads, device=ids.device)[:, None, None]
    cpu_columns = torch.from_numpy(host)
    columns = cpu_columns.to(ids.device)
    places = torch.arange(prompt.columns, device=ids.device)
    seen = (places <= columns[:, :, None]) & (places >= pads)
    mask = seen[:, None]
    if needs_float_mask:
        hidden = torch.finfo(dtype).min
        mask = torch.zeros(mask.shape, dtype=dtype, device=ids.device).masked_fill(~mask, hidden)
    return RowPlan(
        columns=columns,
        input_ids=ids.gather(1, columns),
        position_ids=(cpu_columns + first).to(ids.device),
        mask=mask,
    )
