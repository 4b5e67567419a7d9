"""The Triton kernels compile for NVIDIA architectures on a machine without a GPU."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[2]


@functools.cache
def compile_for(target: int) -> dict[str, dict[str, str]]:
    """What ``compile_kernels.py`` prints, run in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script, str(target)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", [80, 100])
def test_other_architectures(target):
    assert set(compile_for(target)) == {"64", "128", "256"}


def test_hopper_feeds_decoded_tiles_from_registers():
    for head_dim, report in compile_for(90).items():
        loop = report["ttgir"]
        packed = loop[loop.rindex("scf.for") :]
        packed = packed[: packed.index("warp_group_dot")]
        assert "async_wait" in packed, "the packed loop is not pipelined"
        assert loop[: loop.rindex("scf.for")].count("async_copy_global_to_local") > 20
        # Packed keys, packed values, dense keys: the left operands that come from registers.
        dots = re.findall(r"ttng\.warp_group_dot .* : (\S+<[^>]*>.*?) \*", loop)
        assert sum("dot_op" in dot for dot in dots) == 3, (head_dim, dots)


def test_hopper_machine_code_sets_every_descriptor():
    # ptxas 12 sometimes advances a descriptor from a register that it never set (see the kernel).
    for report in compile_for(90).values():
        if report["sass"] is None:
            pytest.skip("this Triton brings no disassembler")
        assert "HGMMA" in report["sass"]
        assert not re.search(r"UIADD3 (UR\d+), UP\d, \1, 0x20,", report["sass"])
