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


ROW_A_LANE = (
    r"threadsPerWarp = \[32(, 1)*\], warpsPerCTA = \[4(, 1)*\]",
    r"lane = \[\[1(, 0)*\], \[2(, 0)*\], \[4(, 0)*\], \[8(, 0)*\], \[16(, 0)*\]\]",
    r"lane = \[\[0, 0, 1\], \[0, 0, 2\], \[0, 1, 0\], \[0, 2, 0\], \[0, 4, 0\]\]",
)


@pytest.mark.parametrize("target", [80, 90, 100])
def test_lanes_that_talk_to_each_other_are_the_format_s(target):
    # Shuffles and shared memory in inline PTX take a row of a tensor for a lane of the warp.
    for report in compile_for(target).values():
        text = report["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
        found = 0
        for ptx, types in re.findall(
            r'tt\.elementwise_inline_asm "([^"]*)"[^\n]*?-> ([^\n]*?) loc', text
        ):
            if "shfl" in ptx or "st.shared" in ptx:
                name = re.search(r"tensor<[\dx]+x[if]32, (#\w+)>", types)[1]
                assert any(re.search(row, layouts[name]) for row in ROW_A_LANE), layouts[name]
                found += 1
        assert found >= 3


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
