"""Whether the kernels of the ``register`` word order do what they should on this very machine."""

from __future__ import annotations

import functools

import torch

from .exponent_pack import register_pack
from .exponent_unpack import register_unpack
from .packed_attention import packed_attention
from .packed_attention.reference import packed_attention_reference
from .register_blocks import BLOCK_TOKENS, RegisterBlocks


@functools.cache
def kernels_fail(device: torch.device, head_dim: int) -> str | None:
    """What goes wrong with heads of ``head_dim`` on ``device``, None if nothing does.

    One block with patches and escapes is packed, unpacked and compared bit by bit, and attended to
    with some tokens behind it. Once per process: it also compiles what a cache needs.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _failure(device, head_dim)
    except Exception as error:  # no compiler, another Triton, ...: they have no common class
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return f"{type(error).__name__}: {reason}"


def _failure(device: torch.device, head_dim: int) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 2, BLOCK_TOKENS + 70, head_dim, generator=generator)
    x = x * torch.rand(head_dim, generator=generator).exp2()
    x[:, :, :, ::9, ::7] *= 2.0**-9  # escapes
    x[:, :, :, 5::31, 3::17] *= 2.0**-40  # patches
    x[:, :, :, 7, 2] = 0.0
    q, keys, values = x.bfloat16().to(device)
    blocks = RegisterBlocks.allocate(1, 2, head_dim, 1, device, pool_words=1 << 14)
    register_pack(keys[:, :, :BLOCK_TOKENS], values[:, :, :BLOCK_TOKENS], blocks)
    if bool((blocks.table < 0).any()):
        return "a block that has a packed form was not packed"
    for states, found in zip((keys, values), register_unpack(blocks), strict=True):
        sealed = states[:, :, :BLOCK_TOKENS]
        if not torch.equal(sealed.contiguous().view(torch.int16), found.view(torch.int16)):
            return "unpacking gives other bits than were packed"
    q = q.flatten(0, 1)[None, :, :1].repeat_interleave(4, 1)
    scale = head_dim**-0.5
    tails = keys[:, :, BLOCK_TOKENS:], values[:, :, BLOCK_TOKENS:]
    out = packed_attention(q, blocks, *tails, scale=scale).float()
    expected = packed_attention_reference(q, keys, values, scale=scale)
    error = float((out - expected).norm() / expected.norm())
    return None if error < 1e-2 else f"attention is off by {error:.1e}"
