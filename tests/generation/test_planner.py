"""The planner's arithmetic, by the worked examples of the literature and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_kvcodecs import plan
from hf_kvcodecs.cli import main
from hf_kvcodecs.generation.planner import (
    lockstep_peak_as_printed,
    plan_round,
    remote_request_seconds,
)

MISTRAL = {
    "weight_bytes": 48e9,
    "kv_bytes": 5e9,
    "ratio": 0.2,
    "draft_length": 25,
    "accepted": 0.85 * 25,
    "batch": 6,
    "memory_bandwidth": 1600e9,
    "link_bandwidth": 64e9,
}


def test_mistral_24b():
    made = plan(**MISTRAL)
    assert made.memory_bytes_read == pytest.approx(55.2e9)
    assert made.memory_seconds == pytest.approx(34.5e-3)
    assert made.link_bytes == pytest.approx(1.2e9)
    assert made.link_seconds == pytest.approx(18.75e-3)
    assert made.bound == "memory"
    assert made.iteration_seconds == made.memory_seconds
    assert made.throughput == pytest.approx(149, abs=0.5)  # printed as 312


def test_qwen_32b():
    made = plan(**MISTRAL | {"weight_bytes": 64e9})
    assert made.memory_bytes_read == pytest.approx(71.2e9)
    assert made.memory_seconds == pytest.approx(44.5e-3)


def test_peak_memory_of_staggering():
    made = plan(
        **MISTRAL | {"kv_bytes": 4e9, "ratio": 0.25, "draft_length": 30, "accepted": 0, "batch": 10}
    )
    assert made.peak_bytes == pytest.approx(48e9 + 10e9 + 4e9)
    assert made.lockstep_peak_bytes == pytest.approx(48e9 + 10e9 + 40e9)
    assert lockstep_peak_as_printed(48e9, 4e9, 10) == pytest.approx(48e9 + 40e9)


def test_the_links_law():
    slow = MISTRAL | {"link_bandwidth": 1e9}
    made = plan(**slow)
    assert made.bound == "link"
    # (x + 1) instead of x forwards: a verification's own iteration.
    assert made.throughput * 26 / 25 == pytest.approx(made.link_limit)
    for changed in ({"batch": 60}, {"ratio": 0.05}):
        assert plan(**slow | changed).link_limit == made.link_limit
    packed = plan(**slow, link_ratio=0.71)
    assert packed.throughput == pytest.approx(made.throughput / 0.71)


def test_the_critical_ratio_is_where_both_take_the_same_time():
    heavy = MISTRAL | {"batch": 60, "memory_bandwidth": 3200e9}
    heavy["link_bandwidth"] = heavy["memory_bandwidth"] / (25 * (0.3 + 48 / 300) + 1)
    at = plan(**heavy | {"ratio": 0.3})
    assert at.critical_ratio == pytest.approx(0.3)
    assert at.memory_seconds == pytest.approx(at.link_seconds)
    assert plan(**heavy | {"ratio": 0.29}).bound == "link"
    assert plan(**heavy | {"ratio": 0.31}).bound == "memory"


def test_a_full_cache_with_the_batch_that_fits():
    made = plan(**MISTRAL, capacity_bytes=96e9)
    assert made.plain_batch == 9
    assert made.plain_throughput == pytest.approx(9 * 1600 / (48 + 45))
    assert plan(**MISTRAL).plain_batch is None


def test_one_round():
    options = {
        "draft_step_seconds": 6e-3,
        "verify_seconds": 20e-3,
        "kv_bytes": 8e9,
        "link_bandwidth": 50e9,
        "draft_length": 25,
        "accepted": 12,
    }
    alone = plan_round(**options)
    assert alone.seconds == pytest.approx(0.15 + 0.16)
    assert plan_round(**options, staging_bytes=4e9).seconds == pytest.approx(0.15 + 0.08)
    assert plan_round(**options, staging_bytes=8e9).seconds == pytest.approx(0.15 + 0.02)
    assert plan_round(**options, link_ratio=0.5).seconds == pytest.approx(0.15 + 0.08)
    assert alone.throughput == pytest.approx(13 / 0.31)
    assert replace(alone, tokens=26).throughput == pytest.approx(2 * alone.throughput)


def test_a_remote_prefix():
    options = {
        "kv_bytes": 5e9,
        "ratio": 0.25,
        "slow_bandwidth": 1.25e9,
        "fast_bandwidth": 40e9,
        "tokens": 200,
        "draft_length": 40,
        "accepted": 20,
        "decode_seconds": 0.03,
        "verify_seconds": 0.05,
    }
    assert remote_request_seconds(**options) == pytest.approx(1 + 10 * 1.2)
    slow = options | {"fast_bandwidth": 2.5e9}
    assert remote_request_seconds(**slow) == pytest.approx(1 + 10 * 2.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 0}, "ratio: expected a part"),
        ({"accepted": 26}, r"accepted: expected 0 to draft_length \(25\)"),
        ({"batch": 0}, "batch: expected a positive number"),
    ],
)
def test_arguments_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        plan(**MISTRAL | change)


def test_on_the_command_line(capsys):
    arguments = "plan --weights 48 --kv 5 --ratio 0.2 --draft-length 25 --accepted 21.25 --batch 6"
    assert main([*arguments.split(), "--memory-bandwidth", "1600", "--link-bandwidth", "64"]) == 0
    shown = capsys.readouterr().out
    assert "34.5 ms" in shown
    assert "18.8 ms" in shown
    assert "149" in shown
    assert main([*arguments.split(), "--ratio", "2"]) == 2
    assert "ratio: expected a part" in capsys.readouterr().err
