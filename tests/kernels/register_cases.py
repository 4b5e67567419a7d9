"""Keys and values that try the register word order, for tests of every implementation."""

from __future__ import annotations

import torch


def ordinary(batch: int, kv_heads: int, tokens: int, head_dim: int, seed: int = 0):
    """Normal numbers with a spread of channel sizes, a zero and a few misfits in each kind."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        x = torch.randn(batch, kv_heads, tokens, head_dim, generator=generator)
        x = x * torch.randn(head_dim, generator=generator).exp2()
        x[..., 3, 5], x[..., 17, 9], x[..., tokens - 1, head_dim - 1] = 0.0, -0.0, 1e-20
        x[..., 5, 7] = 3e-39  # subnormal
        return x.bfloat16()

    return draw(), draw()


def adversarial(head_dim: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Blocks ``[1, 1, 128, head_dim]`` that real caches do not hold: by name, keys and values."""
    shape = (1, 1, 128, head_dim)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    bits = torch.arange(128 * head_dim, dtype=torch.int32) * 8 % 65536
    every = bits.to(torch.int16).view(shape).view(torch.bfloat16)
    huge = normal.clone()
    huge[..., 3] *= 2.0**100
    nan, inf = normal.clone(), normal.clone()
    nan[..., 40, 2], inf[..., 41, 6], inf[..., 100, 1] = float("nan"), float("inf"), -float("inf")
    zeros = torch.zeros(shape).bfloat16()
    sparse = normal.clone()
    sparse[..., ::2] = 0
    return {
        "zeros": (zeros, -zeros),
        "half the channels zero": (sparse, sparse),
        "every pattern": (every, every.flip(2)),
        "one huge channel": (huge, huge),
        "nan": (nan, nan),
        "infinities": (inf, inf),
        "subnormals": (normal * 2.0**-126, normal * 2.0**-130),
        "tiny": (normal * 2.0**-120, normal * 2.0**-100),
        "many escapes": (normal * every.isfinite(), (normal.float() ** 5).bfloat16()),
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Integer comparison: NaN payloads and the signs of zeros count."""
    return torch.equal(left.cpu().view(torch.int16), right.cpu().view(torch.int16))
