"""The plain-torch references in the place of the kernels, which on a CPU are only interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_kvcodecs.caches import fused, pooled
from hf_kvcodecs.kernels.packed_attention.reference import packed_attention_reference
from hf_kvcodecs.kernels.register_reference import (
    register_pack_reference,
    register_unpack_reference,
)


def attention_reference(q, blocks, tail_keys, tail_values, *, scale=None, starts=None):
    sealed = register_unpack_reference(blocks)
    tails = tail_keys, tail_values
    states = (torch.cat(parts, 2) for parts in zip(sealed, tails, strict=True))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return packed_attention_reference(q, *states, scale=scale, starts=starts).bfloat16()


def references_for_kernels(
    replace: Callable[[Any, str, Any], None] = setattr, *, attention: bool = True
) -> None:
    """Has caches on a CPU keep what a GPU's would, ``replace`` (monkeypatch.setattr) being what
    sets attributes. ``attention``: attention too."""
    replace(fused, "fused_device", lambda device: True)
    replace(fused, "kernels_fail", lambda *_: None)
    for module in (fused, pooled):
        replace(module, "register_pack", register_pack_reference)
        replace(module, "register_unpack", register_unpack_reference)
        if attention:
            replace(module, "packed_attention", attention_reference)
