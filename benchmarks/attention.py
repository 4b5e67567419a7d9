"""How long attention over a long cache takes: packed against every dense kernel, in one process.

    python benchmarks/attention.py --kv kv.safetensors            # the whole table
    python benchmarks/attention.py --kv kv.safetensors --quick    # the headline shapes

Needs a GPU, Triton and matplotlib; ``fa3-fwd`` and ``zstandard`` where they are to be compared.
``kv.safetensors`` has ``keys`` and ``values`` of a real model (``python benchmarks/capture_kv.py``
writes it): heads of 64 channels side by side make wider ones, tokens are repeated to the length
wanted. Times are CUDA graph replays of ten calls over data larger than the L2 cache (median of
twelve), in microseconds: no host time, the merge included. ``--eager`` adds single calls with a
cold L2 as ``triton.testing.do_bench`` times them, where a call's host time counts. A case is timed
only after its result was compared with fp32: an error more than twice the best peer's stops the
run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from common import NotExactError, argument_parser, commit, print_table, write_results
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_kvcodecs.kernels.exponent_pack import register_pack
from hf_kvcodecs.kernels.exponent_unpack import register_unpack
from hf_kvcodecs.kernels.packed_attention import packed_attention
from hf_kvcodecs.kernels.packed_attention.reference import packed_attention_reference
from hf_kvcodecs.kernels.register_blocks import RegisterBlocks

L2_BYTES = 120 << 20  # twice the H200's
HEADLINE = ((1, 65536), (8, 65536), (8, 32768), (1, 131072))
SHAPES = {  # query heads, KV heads, head_dim
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-8B": (32, 8, 128),
    "16/2": (16, 2, 128),
    "MHA 32/32": (32, 32, 128),
    "d64 32/8": (32, 8, 64),
    "d256 16/4": (16, 4, 256),
}


def states(kv: dict[str, torch.Tensor], kind: str, batch: int, heads: int, tokens: int, dim: int):
    """``[batch, heads, tokens, dim]`` bf16 on the GPU, from captured heads of 64 channels."""
    x = kv[kind].cuda().view(torch.bfloat16)  # [captured heads, captured tokens, 64]
    side, length = dim // 64, x.shape[1]
    x = x.unflatten(0, (-1, side)).transpose(1, 2).flatten(2)
    x = x[torch.arange(batch * heads, device="cuda") % x.shape[0]].unflatten(0, (batch, heads))
    return x.repeat(1, 1, -(-tokens // length), 1)[:, :, :tokens].contiguous()


def replayed(calls: list[Callable[[], Any]], times: int = 10) -> float:
    """Microseconds a call when a graph of ``times`` calls, round ``calls``, is replayed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        with torch.cuda.graph(graph, stream=stream):
            for n in range(times):
                calls[n % len(calls)]()
    torch.cuda.synchronize()
    begun = time.monotonic()
    while time.monotonic() - begun < 0.025:  # after a pause calls are up to 10 % slower
        graph.replay()
        torch.cuda.synchronize()
    found = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / times)
    return sorted(found)[len(found) // 2]


def eager(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one call with a cold L2, host time included where the GPU waits for it."""
    return triton.testing.do_bench(calls[0], warmup=20, rep=100, return_mode="median") * 1e3


def flash3() -> Callable[..., torch.Tensor] | None:
    """FlashAttention-3's decoding kernel, if the package ``fa3-fwd`` is installed."""
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_with_kvcache


def contenders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tail: int) -> dict[str, Any]:
    """Calls by name, and what the packed blocks take."""

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    sealed = k.shape[2] - tail
    blocks = RegisterBlocks.allocate(*k.shape[:2], k.shape[3], sealed // 128, "cuda")
    register_pack(k[:, :, :sealed], v[:, :, :sealed], blocks)
    blocks.check()
    tails = k[:, :, sealed:].contiguous(), v[:, :, sealed:].contiguous()
    dense = RegisterBlocks.allocate(*k.shape[:2], k.shape[3], 1, "cuda")
    calls = {
        "packed": lambda: packed_attention(q, blocks, *tails),
        "triton bf16": lambda: packed_attention(q, dense, k, v, splits=24),
    }
    if q.shape[2] == 1:  # torch aligns a causal mask of several queries at the top left
        calls["cuDNN"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
        calls["flash"] = lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    fa3 = flash3()
    if fa3 is not None:
        q3, k3, v3 = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        lengths = torch.full((len(k),), k.shape[2], dtype=torch.int32, device="cuda")
        calls["FA3"] = lambda: fa3(q3, k3, v3, cache_seqlens=lengths, causal=True).transpose(1, 2)
    return {"calls": calls, "blocks": blocks}


def gate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, found: dict[str, Any]) -> float:
    """The packed result's relative error against fp32.

    Raises:
        NotExactError: it is more than twice the best peer's, or unpacking is not exact.
    """
    blocks = found["blocks"]
    sealed = blocks.blocks * 128
    for states_, unpacked in zip((k, v), register_unpack(blocks), strict=True):
        if not torch.equal(states_[:, :, :sealed].view(torch.int16), unpacked.view(torch.int16)):
            raise NotExactError("register_unpack")
    row = slice(0, 1)
    expected = packed_attention_reference(q[row], k[row], v[row], scale=q.shape[3] ** -0.5)
    errors = {
        name: float((call()[row].float() - expected).norm() / expected.norm())
        for name, call in found["calls"].items()
    }
    own = errors.pop("packed")
    if not own <= 2 * min(errors.values()):
        raise NotExactError(f"packed_attention: error {own}, peers {errors}")
    return own


def case(
    kv: dict[str, torch.Tensor], shape: str, batch: int, tokens: int, q_tokens: int, args: Any
) -> dict[str, Any]:
    """One line of the table."""
    q_heads, kv_heads, dim = SHAPES[shape]
    q = torch.randn(batch, q_heads, q_tokens, dim, device="cuda").bfloat16()
    k, v = (states(kv, kind, batch, kv_heads, tokens, dim) for kind in ("keys", "values"))
    if args.gaussian:
        k, v = torch.randn_like(k), torch.randn_like(v)
    found = [contenders(q, k, v, args.tail)]
    error = gate(q, k, v, found[0])
    copies = min(-(-L2_BYTES // (2 * k.nbytes)), 8)  # small caches: several, so that L2 is cold
    found += [contenders(q, k.clone(), v.clone(), args.tail) for _ in range(copies - 1)]
    blocks = found[0]["blocks"]
    row: dict[str, Any] = {
        "shape": shape, "batch": batch, "tokens": tokens, "q_tokens": q_tokens,
        "data": "gaussian" if args.gaussian else "real",
    }  # fmt: skip
    for name in found[0]["calls"]:
        calls = [one["calls"][name] for one in found]
        try:
            row[name] = replayed(calls)
            if args.eager:
                row[f"{name} eager"] = eager(calls)
        except RuntimeError as problem:  # a backend that does not take the shape
            print(f"{name}: {str(problem).splitlines()[0][:80]}")
    peers = [row[name] for name in ("cuDNN", "flash", "FA3", "triton bf16") if name in row]
    row["factor"] = min(peers) / row["packed"]
    row["bits"] = blocks.nbytes * 8 / (2 * blocks.table.numel() * 128 * dim)
    row |= breakdown(row, min(peers))
    if args.eager:
        peers = [row[f"{name} eager"] for name in ("cuDNN", "flash", "FA3") if name in row]
        row["eager factor"] = min(peers) / row["packed eager"]
    row["raw_blocks"] = int(blocks.cursors[1])
    return row | rates(blocks) | {"error": error}


def breakdown(row: dict[str, Any], dense: float) -> dict[str, float]:
    """What fewer bytes save, and what decoding them adds, in microseconds, if packed bytes are read
    as fast as the fastest dense kernel reads its own in ``dense`` microseconds."""
    loading = dense * row["bits"] / 16
    return {"loading saved": dense - loading, "arithmetic added": row["packed"] - loading}


def rates(blocks: RegisterBlocks) -> dict[str, float]:
    """How many units of 16 numbers have escapes stored (quads counted full), and how many numbers
    are patched."""
    dim = blocks.head_dim
    slots = blocks.words[blocks.table.flatten().clamp(min=0).long()]
    counts = slots[:, 22 * 4 * dim :][:, :16].unflatten(1, (2, 4, 2))[..., 1].long()
    numbers = len(slots) * 128 * dim
    quads = (counts >> 16 & 255) + (counts >> 24 & 255)
    return {
        "escape_units": 4 * float(quads.sum()) / (2 * numbers / 16),
        "key_misfits": float((counts & 255).sum()) / numbers,
        "value_misfits": float((counts >> 8 & 255).sum()) / numbers,
    }


def codec_latency(kv: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Encode and decode of one block of 8 heads and of a cache of 64K tokens, in microseconds."""
    rows = []
    for tokens in (128, 65536):
        k, v = (states(kv, kind, 1, 8, tokens, 128) for kind in ("keys", "values"))
        blocks = RegisterBlocks.allocate(1, 8, 128, tokens // 128, "cuda")

        def encode(k: torch.Tensor = k, v: torch.Tensor = v, blocks: RegisterBlocks = blocks):
            blocks.blocks = 0
            blocks.cursors.zero_()
            register_pack(k, v, blocks)

        row = {"tokens": tokens, "encode": replayed([encode], 4)}
        row["decode"] = replayed([lambda blocks=blocks: register_unpack(blocks)], 4)
        row["copy"] = replayed([lambda k=k, v=v: (k.clone(), v.clone())], 4)
        row |= nvcomp_latency(torch.cat([k, v]).view(torch.uint8).flatten())
        data = torch.cat([k, v]).cpu().view(torch.int16).numpy().tobytes()
        try:
            import zstandard
        except ImportError:
            rows.append(row)
            continue
        begin = time.perf_counter()
        small = zstandard.ZstdCompressor(level=1, threads=-1).compress(data)
        middle = time.perf_counter()
        zstandard.ZstdDecompressor().decompress(small)
        end = time.perf_counter()
        row |= {"zstd encode": (middle - begin) * 1e6, "zstd decode": (end - middle) * 1e6}
        row["zstd bits"] = 16 * len(small) / len(data)
        rows.append(row)
    return rows


def nvcomp_latency(data: torch.Tensor) -> dict[str, float]:
    """nvCOMP's entropy coder (``nvidia-nvcomp-cu12``) on the same bytes, if it is installed."""
    try:
        from nvidia import nvcomp
    except ImportError:
        return {}
    codec, source = nvcomp.Codec(algorithm="ANS"), nvcomp.as_array(data)
    packed = codec.encode(source)

    def median(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6)
        return sorted(times)[len(times) // 2]

    return {
        "nvCOMP encode": median(lambda: codec.encode(source)),
        "nvCOMP decode": median(lambda: codec.decode(packed)),
        "nvCOMP bits": 16 * packed.buffer_size / data.numel(),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Factor against context, a line per shape and batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in rows:
        if row["q_tokens"] == 1:
            lines.setdefault((row["shape"], row["batch"]), []).append(
                (row["tokens"], row["factor"])
            )
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (shape, batch), points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{shape}, batch {batch}")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xscale="log", xlabel="tokens", ylabel="fastest bf16 attention / packed")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def environment() -> dict[str, Any]:
    arguments = [Path(word).name if "/" in word else word for word in sys.argv]
    command = ["python", f"benchmarks/{arguments[0]}", *arguments[1:]]
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cudnn": torch.backends.cudnn.version(),
        "commit": commit(), "command": " ".join(command),
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__, "attention")
    parser.add_argument("--kv", type=Path, required=True, help="captured keys and values")
    parser.add_argument("--quick", action="store_true", help="the headline shapes only")
    parser.add_argument("--eager", action="store_true", help="single calls too, host time included")
    parser.add_argument("--codec", action="store_true", help="encode and decode alone")
    parser.add_argument("--gaussian", action="store_true", help="normal numbers instead")
    parser.add_argument("--tail", type=int, default=64, help="dense tokens behind the blocks")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cases after this")
    args = parser.parse_args()
    kv = load_file(args.kv)
    cases = [("Llama-3.1-8B", batch, tokens, 1) for batch, tokens in HEADLINE]
    cases += [("Llama-3.1-8B", 1, 65536, q_tokens) for q_tokens in (8, 25)]
    if not args.quick:
        for shape in SHAPES:
            wide = shape in ("Llama-3.1-8B",)
            for batch in (1, 4, 8, 16) if wide else (1, 8):
                for tokens in (8192, 32768, 65536, 131072) if wide else (8192, 65536):
                    if (shape, batch, tokens, 1) not in cases and shape != "Qwen3-8B":
                        cases.append((shape, batch, tokens, 1))
    if args.codec:
        cases = []
    begin, rows = time.monotonic(), []
    for shape, batch, tokens, q_tokens in cases:
        if time.monotonic() - begin > args.seconds:
            print(f"left out for want of time: {shape} {batch} x {tokens}")
            continue
        rows.append(case(kv, shape, batch, tokens + args.tail, q_tokens, args))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    codec = codec_latency(kv)
    write_results(args.out, environment(), [*rows, *({"codec": row} for row in codec)])
    if rows:
        plot(rows, args.out.with_suffix(".png"))
    print_table("Encode and decode, microseconds", codec)
    names = ("shape", "batch", "tokens", "q_tokens", "packed", "cuDNN", "flash", "FA3", "factor")
    print_table("Attention, microseconds a call", rows, {name: name for name in names})


if __name__ == "__main__":
    main()
