"""A rank with a wrong flag, or asked for --help: the others do not wait for it.

The build with switches lets a rank stay for LLMC_DECLINE_S seconds to tell the others. Here that is
longer than run_ranks waits, so that a run which ends has not waited in vain.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from helpers import Result, Trainer, assert_refused
from many_ranks import (
    LOCALHOST,
    MPI_ENV,
    WAYS,
    Joint,
    Lab,
    Ranks,
    assert_all_end_well,
    assert_all_refused,
    connections,
    free_port,
    listens,
    run_ranks,
    switches_binary,
)

# What Slurm tells the processes of a step that has several.
LAUNCHED = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}


@pytest.fixture(autouse=True)
def long_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_DECLINE_S", "250")


@pytest.fixture(scope="module")
def bf16(pytestconfig: pytest.Config) -> Trainer:
    return switches_binary(pytestconfig)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("not_starting"))


def one_has(lab: Lab, victim: int, *more: object):
    """Flags by rank: `victim` has some more."""
    return lambda rank: [*lab.args(6, {"-x": 3}), *(more if rank == victim else ())]


def wrong(lab: Lab, victim: int):
    return lambda rank: lab.args(6, {"-x": 3, **({"-b": 0} if rank == victim else {})})


def assert_others_refused(run: Joint, victim: int, text: str) -> None:
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
            time.sleep(0.5)
        run = ranks.wait()
    assert_others_refused(run, 2, "rank 2: -b 0: must be")


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_the_user_reads_it_before_the_others_do(lab: Lab, bf16: Trainer, way: str) -> None:
    """And what a rank leaves for others that never come is gone with it."""
    env = {"LLMC_DECLINE_S": "6"}
    with Ranks(bf16, 3, way, wrong(lab, 0), lab.folder, only=[0], env=env) as ranks:
        ranks.wait_until(lambda: "-b 0" in ranks.stderr(0))
        assert ranks.started[0].poll() is None
        run = ranks.wait()
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
    for result in run.ranks.values():
        assert_refused(result, "-b 0")


@pytest.mark.parametrize("name", ["LLMC_INIT_TIMEOUT_S", "LLMC_COMM_TIMEOUT_S"])
def test_a_wrong_variable_of_one_rank(lab: Lab, bf16: Trainer, name: str) -> None:
    env = {name: "soon"}
    run = run_ranks(bf16, 3, "tcp", one_has(lab, 1), lab.folder,
                    env=lambda rank: env if rank == 1 else {})
    assert_others_refused(run, 1, f"rank 1: {name}=soon")
    assert_refused(run.ranks[1], f"{name}=soon")


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_start_beside_one_that_still_declines(
    lab: Lab, bf16: Trainer, way: str, victim: int
) -> None:
    """With the same job token at the same place: a rank that still declines leaves it alone."""
    with Ranks(bf16, 3, way, wrong(lab, victim), lab.folder, only=[victim]) as bad:
        bad.wait_until(lambda: "-b 0" in bad.stderr(victim))
        time.sleep(8)  # longer than a start's processes begin within
        assert bad.started[victim].poll() is None
        others = [rank for rank in range(3) if rank != 1]
        with Ranks(bf16, 3, way, one_has(lab, 1), lab.folder, init=bad.init,
                   only=others) as ranks:
            assert_refused(bad.wait().ranks[victim], "-b 0")
            ranks.start(1)
            assert_all_end_well(ranks.wait())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_without_a_gpu(lab: Lab, bf16: Trainer, way: str, victim: int) -> None:
    env = {"LLMC_NO_GPU": "100", "LLMC_HOST": "node7"}
    run = run_ranks(bf16, 3, way, one_has(lab, 2), lab.folder,
                    env=lambda rank: env if rank == victim else {})
    assert_all_refused(run, "no GPU on node7")
    assert "node7:" not in run.error_text, f"{run}"
    if way != "mpi":
        assert_others_refused(run, victim, f"rank {victim}: no GPU on node7")


def test_cuda_says_why_there_is_no_gpu(lab: Lab, bf16: Trainer) -> None:
    run = run_ranks(bf16, 2, "tcp", one_has(lab, 1), lab.folder,
                    env=lambda rank: {"LLMC_NO_GPU": "2", "LLMC_HOST": "node7"} if rank else {})
    assert_all_refused(run, "no GPU on node7: out of")


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("fault, victim, text", [
    ("no_id", 0, "NCCL: no id: "),
    ("no_address", 0, "no address of the GPU"),
    ("no_address", 2, "no address of the GPU"),
])
def test_a_rank_that_fails_between_its_flags_and_the_meeting(
    lab: Lab, bf16: Trainer, way: str, fault: str, victim: int, text: str
) -> None:
    run = run_ranks(bf16, 3, way, one_has(lab, 2), lab.folder,
                    env=lambda rank: {"LLMC_FAULT": fault} if rank == victim else {})
    assert_others_refused(run, victim, f"rank {victim}: {text}")
    assert_refused(run.ranks[victim], text)


# A launcher of MPI that, as srun does, leaves the others alone when a rank fails.
AS_SRUN = ["--mca", "orte_abort_on_non_zero_status", "0"]


def as_srun(rank: int) -> list[str]:
    return ["env", "-u", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS=3", f"SLURM_PROCID={rank}"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_wrong_flag_where_the_launcher_of_mpi_does_not_end_the_others(
    lab: Lab, bf16: Trainer, victim: int
) -> None:
    run = run_ranks(bf16, 3, "mpi", wrong(lab, victim), lab.folder, mpirun=AS_SRUN, prefix=as_srun)
    for rank, result in run.ranks.items():
        assert len(result.errors) == 1, f"rank {rank}\n{run}"
        text = "-b 0: must be" if rank == victim else f"rank {victim}: -b 0: must be"
        assert text in result.errors[0], f"rank {rank}\n{run}"


def test_a_fault_where_the_launcher_of_mpi_does_not_end_the_others(
    lab: Lab, bf16: Trainer
) -> None:
    run = run_ranks(bf16, 3, "mpi", one_has(lab, 2), lab.folder, mpirun=AS_SRUN, prefix=as_srun,
                    env=lambda rank: {"LLMC_FAULT": "no_id"} if rank == 0 else {})
    assert "NCCL: no id: " in run.first.errors[0], f"{run}"
    assert run.first.status != 0, f"{run}"


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
    assert_refused(bf16.run(flags), "-b 0")


# ----------------------------------------------------------------------------- --help, --version


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_waited_for_a_rank_asked_for_help(
    lab: Lab, bf16: Trainer, way: str, victim: int
) -> None:
    run = run_ranks(bf16, 3, way, one_has(lab, victim, "--help"), lab.folder, env=LAUNCHED)
    assert_others_refused(run, victim, f"rank {victim} was asked for --help")
    assert_helped(run.ranks[victim])


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_mpirun_with_help_on_one_rank(lab: Lab, bf16: Trainer, victim: int, flag: str) -> None:
    """mpirun ends the others, and says why."""
    run = run_ranks(bf16, 3, "mpi", one_has(lab, victim, flag), lab.folder)
    assert 0 not in run.statuses and f"process rank {victim}" in run.mpirun, f"{run}"
    assert bool(run.ranks[victim].stdout) == (victim == 0) and "3/3" not in run.stdout, f"{run}"


@pytest.mark.parametrize("way", WAYS)
def test_help_on_all_ranks(lab: Lab, bf16: Trainer, way: str) -> None:
    """mpirun's ranks share an output: one of them prints."""
    run = run_ranks(bf16, 4, way, ["--help"], lab.folder, env={} if way == "mpi" else LAUNCHED)
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
        assert_helped(bf16.run(["--help", *flags]))


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_help_asked_for_by_a_person_does_not_wait_long(
    lab: Lab, bf16: Trainer, way: str, rank: int
) -> None:
    """No launcher says that there are others: two seconds, and not LLMC_DECLINE_S."""
    run = run_ranks(bf16, 2, way, ["--help"], lab.folder, only=[rank])
    assert_helped(run.ranks[rank])


def mpirun_sh(bf16: Trainer, lab: Lab, script: str, **env: str) -> subprocess.CompletedProcess:
    words = shlex.join([str(bf16.binary), *map(str, lab.args(4, {"-x": 3}))])
    return subprocess.run(
        ["mpirun", "-np", "2", "sh", "-c", script.replace("TRAIN", words)], text=True, timeout=60,
        capture_output=True, check=False, env={**os.environ, **MPI_ENV, **env})


def test_version_and_then_training_in_one_shell(lab: Lab, bf16: Trainer) -> None:
    run = mpirun_sh(bf16, lab, f"{bf16.binary} --version; exec TRAIN")
    assert run.returncode == 0, f"{run}"
    assert run.stdout.count("precision BF16") == 1 and "step    3/3" in run.stdout, f"{run}"


def test_help_on_the_only_rank_that_starts_the_program(lab: Lab, bf16: Trainer) -> None:
    script = f"if [ $OMPI_COMM_WORLD_RANK = 0 ]; then {bf16.binary} --help; fi"
    run = mpirun_sh(bf16, lab, script, LLMC_DECLINE_S="1")
    assert run.returncode == 0 and run.stdout.startswith("Trains GPT-2"), f"{run}"
    assert run.stderr == "", f"{run}"


def test_a_rank_that_is_here_already_is_not_declined(lab: Lab, bf16: Trainer) -> None:
    """A second rank 1 with a wrong flag does not end a start in which the first one waits."""
    port = free_port()
    init = ["-ps", LOCALHOST, "-pp", port]
    args = one_has(lab, 2)
    with Ranks(bf16, 3, "tcp", args, lab.folder, init=init, only=[0, 1]) as ranks:
        ranks.wait_until(lambda: connections(port) >= 1)
        time.sleep(1)
        other = run_ranks(bf16, 3, "tcp", wrong(lab, 1), lab.folder, init=init, only=[1])
        assert_refused(other.ranks[1], "-b 0")
        ranks.start(2)
        assert_all_end_well(ranks.wait())


def test_two_processes_with_rank_0(lab: Lab, bf16: Trainer) -> None:
    """The first one said that the second had been started as one of 1 ranks."""
    port = free_port()
    init, env = ["-ps", LOCALHOST, "-pp", port], {"LLMC_INIT_TIMEOUT_S": "12"}
    args = lab.args(8, {"-x": 3})
    with Ranks(bf16, 2, "tcp", args, lab.folder, init=init, env=env, only=[0]) as first:
        first.wait_until(lambda: listens(LOCALHOST, port))
        second = run_ranks(bf16, 2, "tcp", args, lab.folder, init=init, env=env, only=[0])
        run = first.wait()
    assert_all_refused(second, f"port {port} is in use", "by a second rank 0")
    assert_all_refused(run, "rank 1 of 2 did not arrive", "it is rank 0, too", "a rank of its own")
