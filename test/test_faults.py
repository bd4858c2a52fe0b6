"""Planted faults: each is caught by the comparison of bits that test_many_ranks.py makes.

The build with switches takes the name of a fault in LLMC_FAULT. Every test runs the same command
twice, with the fault and without, and makes the same comparison of both with one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from helpers import Trainer, checkpoints, model_path
from many_ranks import (
    Lab, assert_all_refused, assert_same_bits, run_ranks, switches_binary, unchecked, without)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def switches(pytestconfig: pytest.Config) -> Trainer:
    return switches_binary(pytestconfig)


def test_without_a_fault_the_switches_change_nothing(
    lab: Lab, bf16: Trainer, switches: Trainer
) -> None:
    for micro in (8, 24):
        assert_same_bits(lab.one(bf16, lab.args(micro)), lab.one(switches, lab.args(micro)))


def test_a_fault_that_there_is_not(lab: Lab, switches: Trainer) -> None:
    """A misspelt fault would test nothing."""
    result = switches.run(lab.args(8), env={"LLMC_FAULT": "owner_fp23"})
    assert result.status == 1 and "owner_fp23" in result.stderr, f"{result}"


@pytest.fixture(scope="module")
def sound(lab: Lab, switches: Trainer) -> Callable[..., None]:
    """Asserts that ranks without a fault give the bits of one process; once for the same ranks."""
    done = set()

    def check(count: int, zero: int, micro: int, delays: dict) -> None:
        key = repr((count, zero, micro, delays))
        if key not in done:
            run = lab.many(switches, count, "tcp", arguments(lab, micro, zero), env=delays)
            assert_same_bits(lab.one(switches, arguments(lab, micro, 0)), run.first)
            done.add(key)

    return check


def arguments(lab: Lab, micro: int, zero: int) -> list[object]:
    """Without --check-ranks: the comparison with one process must itself see ranks come apart."""
    return unchecked(lab.args(micro, {"-z": zero, "-x": 5}))


def assert_caught(
    lab: Lab, switches: Trainer, sound: Callable[..., None], fault: str, count: int, zero: int,
    micro: int, delays: dict | None = None,
) -> None:
    """One process and `count` ranks differ when both have the fault, and are equal without it."""
    delays = delays or {}
    sound(count, zero, micro, delays)
    env = {"LLMC_FAULT": fault, **delays}
    faulty = lab.many(switches, count, "tcp", arguments(lab, micro, zero), env=env)
    one = lab.one(switches, arguments(lab, micro, 0), env=env)
    with pytest.raises(AssertionError, match="different: "):
        assert_same_bits(one, faulty.first)


# Fault, ranks, ZeRO stage, micro-batches: where it can show.
FAULTS = [
    ("owner_fp32", 4, 1, 8),  # a sum of two pieces is rounded once either way
    ("owner_fp32", 8, 0, 8),
    ("swapped_children", 4, 1, 8),  # likewise, the sum of two does not depend on their order
    ("swapped_children", 8, 0, 8),
    ("fused_leaf", 2, 1, 6),  # a rank of one slot has no leaf to fuse: N = W against any other N
    ("fused_leaf", 8, 0, 8),
    ("round_robin", 2, 1, 8),
    ("round_robin", 4, 1, 8),
    ("rank_seed", 2, 1, 8),
    ("rank_seed", 8, 0, 8),
]


@pytest.mark.parametrize("fault, count, zero, micro", FAULTS)
def test_fault_is_caught(
    lab: Lab, switches: Trainer, sound: Callable[..., None], fault: str, count: int, zero: int,
    micro: int,
) -> None:
    assert_caught(lab, switches, sound, fault, count, zero, micro)


def test_order_of_chunk_sums_is_caught(lab: Lab, switches: Trainer) -> None:
    """In the bits of the norm alone, so that ranks stay together and --check-ranks shows the bits
    of each step. Sums of squares of bf16 values are all but exact in double: it takes many tensors
    for their order to show."""
    changes = {"-e": "custom:L40C16H2T32V256", "-x": 5}
    args = {zero: lab.args(8, {"-z": zero, **changes}) for zero in (0, 1)}
    assert_same_bits(lab.one(switches, args[0]), lab.many(switches, 2, "tcp", args[1]).first)
    env = {"LLMC_FAULT": "rank_order_chunks"}
    one = lab.one(switches, args[0], env=env)
    faulty = lab.many(switches, 2, "tcp", args[1], env=env)
    with pytest.raises(AssertionError, match="different: "):
        assert_same_bits(one, faulty.first)
    assert one.hash == faulty.first.hash, "weights differ, too"


def test_ranks_that_have_come_apart_save_nothing(
    lab: Lab, switches: Trainer, tmp_path: Path
) -> None:
    """Such a checkpoint counted as complete, pruned the good ones, and nobody could resume it."""
    out = tmp_path / "out"
    args = [*arguments(lab, 8, 1), "-o", out, "-n", 2, "-nk", 1]
    lab.many(switches, 2, "tcp", [*without(args, "-x"), "-x", 2])
    assert checkpoints(out) == [2]
    run = run_ranks(switches, 2, "tcp", [*args, "-y", 1], lab.folder,
                    env={"LLMC_FAULT": "no_weight_gather"})
    assert_all_refused(run, "checkpoint of step 4 is not written", "rank 1 has other weights")
    assert checkpoints(out) == [2] and not model_path(out, 4).exists()


@pytest.mark.parametrize("fault, count, zero", [
    ("early_reduce", 2, 0), ("early_reduce", 4, 1), ("early_gather", 2, 1), ("early_gather", 4, 1),
])
def test_missing_wait_is_caught(
    lab: Lab, switches: Trainer, sound: Callable[..., None], fault: str, count: int, zero: int
) -> None:
    """What no event orders comes in another order once the computation is slow."""
    delays = {"LLMC_DELAY_MAIN_US": "2000"}
    assert_caught(lab, switches, sound, fault, count, zero, 8, delays=delays)
