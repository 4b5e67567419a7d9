"""Compiles every kernel for one GPU architecture, without a GPU, and prints what came of it.

    python tests/kernels/compile_kernels.py 90

JSON: per kernel the TTGIR text of the attention kernel and, where the package has a disassembler,
its machine code. Run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_kvcodecs.kernels.exponent_pack.kernel import _pack_kernel
from hf_kvcodecs.kernels.exponent_unpack.kernel import _unpack_kernel
from hf_kvcodecs.kernels.packed_append.kernel import _append_kernel
from hf_kvcodecs.kernels.packed_attention.kernel import _merge_kernel, _packed_attention_kernel
from hf_kvcodecs.kernels.ragged_attention.kernel import (
    _ragged_attention_kernel,
    _ragged_merge_kernel,
)
from hf_kvcodecs.kernels.register_blocks import slot_words

POINTERS = {
    "words_ptr": "*i32", "table_ptr": "*i32", "raw_list_ptr": "*i32", "raw_count_ptr": "*i32",
    "cursors_ptr": "*i32", "pool_ptr": "*i32", "bases_ptr": "*u8", "part_ptr": "*fp32",
    "stat_ptr": "*fp32", "sinks_ptr": "*bf16", "lost_ptr": "*i32", "starts_ptr": "*i32",
    "state_ptr": "*i32", "raw_free_ptr": "*i32",
    "after_ptr": "*i32", "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
RAGGED = {
    "starts_ptr": "*i64", "counts_ptr": "*i64", "cursor_ptr": "*i64", "packed_starts_ptr": "*i64",
    "packed_counts_ptr": "*i64", "key_words_ptr": "*i32", "key_scale_ptr": "*fp16",
    "key_minimum_ptr": "*fp16", "value_words_ptr": "*i32", "value_scale_ptr": "*fp16",
    "value_minimum_ptr": "*fp16",
}  # fmt: skip


def compiled(
    kernel: Any, constants: dict[str, Any], states: str, target: int, rows: str = "i32",
    **options: Any,
):  # fmt: skip
    """``kernel`` for ``target``; pointers to keys, values and the like are ``states``, what is one
    number for all rows or one for each ``rows``."""
    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        other = rows if name in ("ends", "lengths") else "i32"
        other = states if name.endswith("_ptr") else other
        known = POINTERS | (RAGGED if kernel.__name__.startswith("_ragged") else {})
        signature[name] = "constexpr" if name in constants else known.get(name, other)
        if name.endswith("_ptr") or name.startswith("stride"):
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def machine_code(binary: bytes) -> str | None:
    """The disassembly, if Triton brings the tool."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    target = int(sys.argv[1])
    report = {}
    for head_dim in (64, 128, 256):
        layout = {"HEAD_DIM": head_dim, "D": head_dim, "SLOT": slot_words(head_dim), "PACKED": True}
        for own_pool in (0, 448) if head_dim == 128 else (0,):  # not paged, and paged
            paged = {"OWN_POOL": own_pool, "SLOT": slot_words(head_dim) + own_pool}
            compiled(_pack_kernel, layout | paged, "*i16", target, num_warps=16)
        compiled(_unpack_kernel, layout | {"PTX": True}, "*i16", target, num_warps=4)
        attention = layout | {
            "N": 16, "LENGTHS": False, "SEALED": False, "STARTS": False, "WINDOW": 0,
            "EDGES": 0, "SOFTCAP": False, "STAGES": 5 if head_dim < 256 else 4, "PTX": True,
            "RING": 0, "UPCAST": False, "WGMMA": target == 90, "PDL": target >= 90,
        }  # fmt: skip
        registers = 168 if head_dim < 256 else 255
        result = compiled(
            _packed_attention_kernel, attention, "*bf16", target, num_warps=4, maxnreg=registers
        )
        code = machine_code(result.asm["cubin"])
        report[head_dim] = {"ttgir": result.asm["ttgir"], "sass": code}
        append = {"T": 1, "RING": 256, "SEAL_AT": 192, **layout}
        del append["PACKED"]
        compiled(_append_kernel, append, "*i16", target, num_warps=16)
    merge = {
        "HEAD_DIM": 128, "BLOCK_D": 32, "S": 64, "SINKS": True, "LOST": True, "ENDS": True,
        "PDL": target >= 90,
    }  # fmt: skip
    compiled(_merge_kernel, merge, "*bf16", target, num_warps=4, rows="*i32")
    for head_dim in (64, 128, 256):
        ragged = {"SPLITS": 32, "G": 16, "D": head_dim}
        block = {"BLOCK_T": 64 if head_dim < 256 else 32, "UPCAST": False}
        for bits in (0, 4) if head_dim == 128 else (0,):  # without and with quantised tokens
            bits = {"BITS": bits}
            compiled(_ragged_attention_kernel, ragged | block | bits, "*bf16", target, num_warps=4)
        compiled(_ragged_merge_kernel, ragged, "*bf16", target, num_warps=4)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
