"""A rank with a wrong flag, or asked for --help: the others do not wait for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from helpers import Result, Trainer, assert_refused
from many_ranks import (
    LOCALHOST,
    WAYS,
    Joint,
    Lab,
    Ranks,
    assert_all_end_well,
    assert_all_refused,
    free_port,
    run_ranks,
    switches_binary,
)

# Seconds. Those who wait in vain would for 300, a rank that stays to tell others for 10.
AT_ONCE = 9


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("not_starting"))


def one_has(lab: Lab, victim: int, *more: object):
    """Flags by rank: `victim` has some more."""
    return lambda rank: [*lab.args(6, {"-x": 3}), *(more if rank == victim else ())]


def wrong(lab: Lab, victim: int):
    return lambda rank: lab.args(6, {"-x": 3, **({"-b": 0} if rank == victim else {})})


def assert_others_refused(run: Joint, victim: int, text: str) -> None:
    assert run.seconds < AT_ONCE, f"{run}"
    for rank, result in run.ranks.items():
        if rank != victim:
            assert_refused(result, text)


def assert_helped(result: Result) -> None:
    assert result.status == 0 and not result.errors, f"{result}"
    assert result.stdout.startswith("Trains GPT-2"), f"{result}"


# ------------------------------------------------------------------------------------ wrong flags


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_waited_for_a_rank_with_a_wrong_flag(
    lab: Lab, bf16: Trainer, way: str, victim: int
) -> None:
    run = run_ranks(bf16, 3, way, wrong(lab, victim), lab.folder)
    assert_others_refused(run, victim, f"rank {victim}: -b 0: must be")
    assert_refused(run.ranks[victim], "-b 0: must be")


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("order", [(2, 1, 0), (2, 0, 1), (0, 2, 1)], ids=str)
def test_ranks_that_come_later_hear_of_it(
    lab: Lab, bf16: Trainer, way: str, order: tuple[int, ...]
) -> None:
    """Rank 2 is wrong, and says so before rank 0 is there, or before rank 1 is."""
    with Ranks(bf16, 3, way, wrong(lab, 2), lab.folder, only=()) as ranks:
        for rank in order:
            ranks.start(rank)
            time.sleep(1)
        run = ranks.wait()
    assert_others_refused(run, 2, "rank 2: -b 0: must be")


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_the_user_reads_it_before_the_others_do(lab: Lab, bf16: Trainer, way: str) -> None:
    """And what a rank leaves for others that never come is gone with it."""
    env = {"LLMC_INIT_TIMEOUT_S": "3"}
    with Ranks(bf16, 3, way, wrong(lab, 0), lab.folder, only=[0], env=env) as ranks:
        ranks.wait_until(lambda: "-b 0" in ranks.stderr(0), 10)
        assert ranks.started[0].poll() is None
        run = ranks.wait(5)
        assert_refused(run.first, "-b 0")
        if way == "fs":
            assert list(Path(str(ranks.init[1])).iterdir()) == []


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_a_start_after_a_wrong_one(lab: Lab, bf16: Trainer, way: str) -> None:
    """With the same job token at the same place: nothing of the word is left there."""
    bad = Ranks(bf16, 3, way, wrong(lab, 1), lab.folder)
    with bad:
        assert_others_refused(bad.wait(), 1, "rank 1: -b 0")
    run = run_ranks(bf16, 3, way, one_has(lab, 1), lab.folder, init=bad.init)
    assert_all_end_well(run)


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_all_ranks_with_the_same_wrong_flag_do_not_wait_for_each_other(
    lab: Lab, bf16: Trainer, way: str
) -> None:
    run = run_ranks(bf16, 4, way, lab.args(8, {"-b": 0}), lab.folder)
    assert run.seconds < AT_ONCE, f"{run}"
    for result in run.ranks.values():
        assert_refused(result, "-b 0")


@pytest.mark.parametrize("name", ["LLMC_INIT_TIMEOUT_S", "LLMC_COMM_TIMEOUT_S"])
def test_a_wrong_variable_of_one_rank(lab: Lab, bf16: Trainer, name: str) -> None:
    env = {name: "soon"}
    run = run_ranks(bf16, 3, "tcp", one_has(lab, 1), lab.folder,
                    env=lambda rank: env if rank == 1 else {})
    assert_others_refused(run, 1, f"rank 1: {name}=soon")
    assert_refused(run.ranks[1], f"{name}=soon")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_without_a_gpu(
    lab: Lab, pytestconfig: pytest.Config, way: str, victim: int
) -> None:
    env = {"LLMC_NO_GPU": "1", "LLMC_HOST": "node7"}
    run = run_ranks(switches_binary(pytestconfig), 3, way, one_has(lab, 2), lab.folder,
                    env=lambda rank: env if rank == victim else {})
    assert_all_refused(run, "no GPU on node7")
    assert run.seconds < AT_ONCE, f"{run}"
    if way != "mpi":
        assert_others_refused(run, victim, f"rank {victim}: no GPU on node7")


@pytest.mark.parametrize("flags", [
    ["-b", 0, "-pn", 3, "-pr", 1],
    ["-b", 0, "-pi", "tcp", "-pr", 1, "-ps", LOCALHOST],
    ["-b", 0, "-pi", "tcp", "-pn", 3, "-pr", 3, "-ps", LOCALHOST],
    ["-b", 0, "-pi", "tcp", "-pn", 3, "-pr", 1],
    ["-b", 0, "-pi", "fs", "-pn", 3, "-pr", 1],
    ["-b", 0, "-pi", "tcp", "-pn", 3, "-pr", 1, "-pr", 2, "-ps", LOCALHOST],
    ["-b", 0, "-pi", "tcp", "-pn", 3, "-pr", 1, "-ps", "[::"],
    ["-b", 0, "-pi", "fs", "-pn", 3, "-pr", 1, "-pf", "/no/such/folder"],
    ["-b", 0, "-pi", "fs", "-pn", 3, "-pr", 0, "-pf", "/no/such/folder"],
], ids=["mpi", "-pn", "-pr", "-ps", "-pf", "twice", "host", "folder", "folder of rank 0"])
def test_where_the_others_are_is_not_known(bf16: Trainer, flags: list[object]) -> None:
    result = bf16.run(flags)
    assert_refused(result, "-b 0")
    assert result.seconds < 2


# ----------------------------------------------------------------------------- --help, --version


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_waited_for_a_rank_asked_for_help(
    lab: Lab, bf16: Trainer, way: str, victim: int
) -> None:
    run = run_ranks(bf16, 3, way, one_has(lab, victim, "--help"), lab.folder)
    assert_others_refused(run, victim, f"rank {victim} was asked for --help")
    assert_helped(run.ranks[victim])


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_mpirun_with_help_on_one_rank(lab: Lab, bf16: Trainer, victim: int, flag: str) -> None:
    run = run_ranks(bf16, 3, "mpi", one_has(lab, victim, flag), lab.folder)
    assert_all_refused(run, f"rank {victim} was asked for {flag}")
    assert sorted(run.errors) == [0], f"{run}"
    assert run.seconds < AT_ONCE, f"{run}"


@pytest.mark.parametrize("way", WAYS)
def test_help_on_all_ranks(lab: Lab, bf16: Trainer, way: str) -> None:
    """mpirun's ranks share an output: one of them prints."""
    run = run_ranks(bf16, 4, way, ["--help"], lab.folder)
    assert run.seconds < AT_ONCE, f"{run}"
    assert_helped(run.first)
    for rank in (1, 2, 3):
        if way != "mpi":
            assert_helped(run.ranks[rank])
            continue
        assert (run.ranks[rank].status, run.ranks[rank].stdout) == (0, ""), f"{run}"
        assert not run.ranks[rank].errors, f"{run}"


def test_version_of_all_ranks_is_printed_once(lab: Lab, bf16: Trainer) -> None:
    run = run_ranks(bf16, 3, "mpi", ["--version"], lab.folder)
    assert run.stdout.count("precision BF16") == 1, f"{run}"
    assert set(run.statuses) == {0} and not run.errors, f"{run}"


def test_help_of_a_lone_process_waits_for_nobody(bf16: Trainer) -> None:
    for flags in ([], ["-pi", "tcp", "-pn", 2, "-pr", 1], ["-pn", 2]):
        result = bf16.run(["--help", *flags])
        assert_helped(result)
        assert result.seconds < 2


def test_a_rank_that_is_here_already_is_not_declined(lab: Lab, bf16: Trainer) -> None:
    """A second rank 1 with a wrong flag does not end a start in which the first one waits."""
    init = ["-ps", LOCALHOST, "-pp", free_port()]
    args = one_has(lab, 2)
    with Ranks(bf16, 3, "tcp", args, lab.folder, init=init, only=[0, 1]) as ranks:
        time.sleep(1)
        other = run_ranks(bf16, 3, "tcp", wrong(lab, 1), lab.folder, init=init, only=[1])
        assert_refused(other.ranks[1], "-b 0")
        ranks.start(2)
        assert_all_end_well(ranks.wait())
