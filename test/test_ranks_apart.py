"""Ranks with a file of their own, lost where others do not look, or leaving things behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from helpers import Shape, Trainer, checkpoints, model_path, random_weights, write_model
from many_ranks import Lab, Ranks, assert_all_refused, run_ranks, switches_binary, unchecked


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("apart"))


@pytest.mark.parametrize("zero", [0, 1])
def test_another_model_file_on_one_rank(
    lab: Lab, fp32: Trainer, tmp_path: Path, zero: int
) -> None:
    """It trained on, with weights that belonged to neither file."""
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        write_model(tmp_path / f"{rank}" / "m.bin", Shape(), random_weights(Shape(), seed=rank))
    args = unchecked(lab.args(8, {"-e": "m.bin", "-z": zero, "-o": tmp_path / "out", "-n": 5}))

    def in_own_folder(rank: int) -> list[str]:
        return ["sh", "-c", f'cd "{tmp_path}/{rank}" && exec "$@"', "sh"]

    run = run_ranks(fp32, 2, "tcp", args, lab.folder, prefix=in_own_folder)
    assert_all_refused(run, "rank 1", "other weights", "-e")
    assert not checkpoints(tmp_path / "out")


@pytest.mark.parametrize("made", [True, False], ids=["other folders", "no folder"])
def test_an_output_folder_that_is_not_shared(
    lab: Lab, fp32: Trainer, tmp_path: Path, made: bool
) -> None:
    """Checkpoints counted as complete that lacked a rank's part, and could not be resumed from."""
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        if made:
            (tmp_path / f"{rank}" / "out").mkdir()
    args = unchecked(lab.args(8, {"-o": "out", "-n": 2, "-x": 4}))

    def in_own_folder(rank: int) -> list[str]:
        return ["env", "-C", str(tmp_path / f"{rank}")]

    env = {"LLMC_COMM_TIMEOUT_S": "12"}
    run = run_ranks(fp32, 2, "tcp", args, lab.folder, prefix=in_own_folder, env=env)
    assert_all_refused(run, "rank 1", "-o out", "share")
    left = [path for path in tmp_path.rglob("*") if path.name not in ("0", "1")]
    assert sorted(path.parent.name for path in left) == (["0", "1"] if made else []), left


@pytest.mark.parametrize("attempt", range(4))
def test_mpirun_does_not_swallow_the_message(lab: Lab, fp32: Trainer, attempt: int) -> None:
    """It ends all ranks when the first one goes, which was not always the one that had the word."""
    wrong = [{"-i": "/nofile"}, {"-d": 100}, {"-o": "/proc/x"}, {"-b": 0}][attempt]
    for _ in range(2):
        run = run_ranks(fp32, 4, "mpi", lab.args(8, wrong), lab.folder)
        assert_all_refused(run, next(iter(wrong)))


def test_a_rank_that_stops_while_validation_waits_for_weights(
    lab: Lab, pytestconfig: pytest.Config
) -> None:
    """The host waited for a copy behind weights that never came, out of reach of the time limit."""
    trainer = switches_binary(pytestconfig)
    limit = 4
    env = {"LLMC_COMM_TIMEOUT_S": str(limit), "LLMC_DELAY_MAIN_US": "400000"}
    args = unchecked(lab.args(8, {"-x": 100000, "-z": 1, "-v": 1, "-m": 4}))
    with Ranks(trainer, 2, "tcp", args, lab.folder, env=env) as ranks:
        ranks.wait_for_step(1)
        ranks.signal(1, signal.SIGSTOP)
        begin = time.monotonic()
        ranks.wait_until(lambda: "rank 1" in ranks.stderr(0), limit + 20)
        assert time.monotonic() - begin < limit + 18
        ranks.signal(1, signal.SIGKILL)
        ranks.wait(20)


def test_a_step_that_a_lost_rank_had_no_part_in_is_not_printed(
    lab: Lab, pytestconfig: pytest.Config
) -> None:
    """A late host found the step done, since nothing waits for a lost rank any more, and printed it
    with the loss of the step before."""
    trainer = switches_binary(pytestconfig)
    args = unchecked(lab.args(8, {"-x": 100, "-z": 1}))

    def late(rank: int) -> dict[str, str]:
        # Rank 1 never queues step 2. Rank 0 does, and looks for its end after rank 1 is gone.
        return {"LLMC_DELAY_HOST_US": "2000000" if rank == 0 else "60000000"}

    with Ranks(trainer, 2, "tcp", args, lab.folder, env=late) as ranks:
        ranks.wait_until(lambda: ranks.stderr(0).count("the host stands still") == 2, 20)
        ranks.signal(1, signal.SIGKILL)
        run = ranks.wait(20)
    assert run.first.status == 1, f"{run}"
    assert "rank 1 died" in run.first.stderr and "in step 2" in run.first.stderr, f"{run}"
    assert len(run.first.losses) == 1, f"{run}"


def test_a_second_ctrl_c_does_not_wait_for_the_step(
    lab: Lab, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """The first one lets the step end and saves, which takes as long as the step does."""
    args = unchecked(lab.args(8, {"-x": 100, "-o": tmp_path / "out", "-n": 50}))
    env = {"LLMC_DELAY_HOST_US": "30000000"}
    with Ranks(switches_binary(pytestconfig), 1, "tcp", args, lab.folder, env=env) as ranks:
        ranks.wait_until(lambda: "the host stands still" in ranks.stderr(0))
        begin = time.monotonic()
        # Two that come before the process runs again are one to it.
        while ranks.started[0].poll() is None and time.monotonic() - begin < 15:
            ranks.signal(0, signal.SIGINT)
            time.sleep(0.2)
        assert ranks.started[0].poll() == -signal.SIGINT, f"{ranks.wait()}"
    assert not checkpoints(tmp_path / "out")


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_in_the_last_step_saved_nothing(
    lab: Lab, pytestconfig: pytest.Config, tmp_path: Path, count: int
) -> None:
    """Without -n: the run ended with status 0, and with it went what it had trained."""
    args = unchecked(lab.args(8, {"-x": 2, "-o": tmp_path / "out"}))
    env = {"LLMC_DELAY_HOST_US": "3000000"}
    with Ranks(switches_binary(pytestconfig), count, "tcp", args, lab.folder, env=env) as ranks:
        # With several processes a signal counts in the step after the one in which it comes.
        times = 3 - count
        ranks.wait_until(lambda: all(
            ranks.stderr(rank).count("the host stands still") == times for rank in range(count)))
        ranks.signal(count - 1, signal.SIGTERM)
        run = ranks.wait(60)
    assert set(run.statuses) == {0} and len(run.first.losses) == 2, f"{run}"
    assert checkpoints(tmp_path / "out") == [2], f"{run}"


def test_leftovers_of_a_failed_save_go_with_the_next_one(
    lab: Lab, fp32: Trainer, tmp_path: Path
) -> None:
    """Files of a checkpoint that was never complete stayed for ever."""
    out = tmp_path / "out"
    args = lab.args(8, {"-o": out, "-n": 2, "-x": 4, "-nk": 0})
    fp32.train(args)
    (out / "DONE_00000002").unlink()
    assert model_path(out, 2).exists()
    fp32.train(lab.args(8, {"-o": out, "-n": 2, "-x": 6, "-nk": 0, "-y": 1}))
    assert checkpoints(out) == [4, 6]
    assert not model_path(out, 2).exists()
    assert not list(out.glob("state_00000002_*"))


def test_pn_that_contradicts_mpirun(lab: Lab, fp32: Trainer) -> None:
    run = run_ranks(fp32, 2, "mpi", [*lab.args(8), "-pn", 4], lab.folder)
    assert_all_refused(run, "-pn 4", "2")


@pytest.mark.parametrize("way", [["tcp", "-ps", "127.0.0.1"], ["fs", "-pf", "."]])
def test_tcp_and_fs_need_the_number_of_processes(
    lab: Lab, fp32: Trainer, way: list[str]
) -> None:
    """A forgotten -pn made rank 0 train alone."""
    result = fp32.run([*lab.args(8), "-pi", *way])
    assert result.status == 1 and "-pn" in result.stderr, f"{result}"
