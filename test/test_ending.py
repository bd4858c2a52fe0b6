"""How all ranks end when one dies, stops, gets a signal or cannot write."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path

import pytest

from helpers import (
    Trainer,
    assert_checkpoint_whole,
    checkpoints,
    model_path,
    snapshot,
    state_path,
)
from many_ranks import (
    WAYS,
    Lab,
    Ranks,
    assert_all_end_well,
    assert_all_fail,
    assert_all_refused,
    assert_same_bits,
    run_ranks,
    train_ranks,
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("ending"))


# -------------------------------------------------------------------------- ranks that die or stop


def long_run(lab: Lab, out: Path | None = None) -> list[object]:
    return lab.args(8, {"-x": 1000000, **({"-o": out, "-n": 500000} if out else {})})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim, zero", [(0, 0), (2, 1)])
def test_kill_9_in_mid_step(lab: Lab, bf16: Trainer, way: str, victim: int, zero: int) -> None:
    """The others end at once, and say who died, in which step and at which collective. (Under
    mpirun they may be ended by it before they can say so.)"""
    args = lab.args(8, {"-x": 1000000, "-z": zero})
    with Ranks(bf16, 4, way, args, lab.folder) as ranks:
        ranks.wait_for_step(3)
        time.sleep(1)  # heartbeats, which come twice a second, have told where it was
        begin = time.monotonic()
        ranks.signal(victim, signal.SIGKILL)
        run = ranks.wait(60)
    assert time.monotonic() - begin < 45, f"{run}"  # not LLMC_COMM_TIMEOUT_S
    if way == "mpi":
        assert 0 not in run.statuses, f"{run}"
        return
    assert run.ranks.pop(victim).status == -signal.SIGKILL
    assert_all_fail(run, f"rank {victim} died, last heard of in step")
    for result in run.ranks.values():
        assert_says_who_and_where(result.stderr, victim)


def assert_says_who_and_where(text: str, victim: int) -> None:
    assert re.search(rf"rank {victim}\b", text), f"the rank is not named: {text}"
    assert re.search(r"step \d+", text), f"the step is not named: {text}"
    collectives = r"reduc|gather|exchange|hash"
    assert re.search(collectives, text, re.IGNORECASE), f"the collective is not named: {text}"


@pytest.mark.parametrize("way, victim", [("tcp", 0), ("fs", 1), ("mpi", 1)])
def test_kill_stop(lab: Lab, bf16: Trainer, way: str, victim: int) -> None:
    """A stopped rank keeps its connections; the others give up after LLMC_COMM_TIMEOUT_S."""
    limit = 4
    args = lab.args(8, {"-x": 1000000})
    others = [rank for rank in range(4) if rank != victim]
    env = {"LLMC_COMM_TIMEOUT_S": str(limit)}
    with Ranks(bf16, 4, way, args, lab.folder, env=env) as ranks:
        ranks.wait_for_step(3)
        pids = [ranks.pid(rank) for rank in others]
        ranks.signal(victim, signal.SIGSTOP)
        begin = time.monotonic()
        while any(map(is_running, pids)):
            texts = [ranks.stderr(rank) for rank in others]
            assert time.monotonic() - begin < limit + 25, f"ranks {others} still wait\n{texts}"
            time.sleep(0.05)
        assert time.monotonic() - begin > limit / 2, "gave up too early"
        texts = [ranks.stderr(rank) for rank in others]
        with contextlib.suppress(ProcessLookupError):  # mpirun ends it, too
            ranks.signal(victim, signal.SIGKILL)
        run = ranks.wait(60)
    if way == "mpi":  # it ends the others as soon as one has given up
        assert 0 not in run.statuses, f"{run}"
        texts = ["".join(texts)]
    else:
        assert all(run.ranks[rank].status > 0 for rank in others), f"{run}"
    for text in texts:
        assert_says_who_and_where(text, victim)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_short_stop_does_no_harm(lab: Lab, bf16: Trainer) -> None:
    env = {"LLMC_COMM_TIMEOUT_S": "30"}
    args = lab.args(8, {"-x": 50, "-z": 1})
    with Ranks(bf16, 2, "tcp", args, lab.folder, env=env) as ranks:
        ranks.wait_for_step(3)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(3)
        ranks.signal(1, signal.SIGCONT)
        run = ranks.wait(60)
    assert_all_end_well(run)
    assert_same_bits(lab.one(bf16, lab.args(8, {"-x": 50})), run.first)


# --------------------------------------------------------------- signals, disks that are full


def assert_joint_checkpoint(out: Path, count: int) -> int:
    (step,) = checkpoints(out)
    assert_checkpoint_whole(out, step)
    assert len(list(out.glob(f"state_{step:08d}_*.bin"))) == count
    return step


@pytest.mark.parametrize("way, victims", [
    ("tcp", [1]), ("tcp", [0]), ("fs", [0, 1, 2, 3]), ("mpi", [2]), ("mpi", "mpirun"),
], ids=["one rank", "rank 0", "all", "one of mpirun", "mpirun"])
def test_spd_677_sigterm_writes_one_checkpoint_and_all_end(
    lab: Lab, bf16: Trainer, tmp_path: Path, way: str, victims: list[int] | str
) -> None:
    """Whichever rank is asked to stop, all stop after the same step; another number of ranks goes
    on with the bits of a run that was left alone."""
    out = tmp_path / "out"
    # mpirun waits as long before it passes the signal on, and again before it kills.
    patience = ["--mca", "odls_base_sigkill_timeout", "4"] if victims == "mpirun" else []
    with Ranks(bf16, 4, way, long_run(lab, out), lab.folder, mpirun=patience) as ranks:
        ranks.wait_for_step(3)
        if victims == "mpirun":
            ranks.mpirun_process.send_signal(signal.SIGTERM)
        else:
            for rank in victims:
                ranks.signal(rank, signal.SIGTERM)
        run = ranks.wait(30)
    step = assert_joint_checkpoint(out, 4)
    assert f"stopped after {step} steps; -y 1 goes on" in run.first.stdout, f"{run}"
    assert not run.errors, f"{run}"
    if victims != "mpirun":  # which counts what it has ended itself as failed
        assert set(run.statuses) == {0}, f"{run}"
    last = lab.args(8, {"-x": step + 2})
    resumed = train_ranks(bf16, 2, "tcp", [*last, "-o", out, "-y", 1], lab.folder)
    one = lab.one(bf16, last)
    assert (resumed.first.hash, resumed.first.bits) == (one.hash, one.bits), f"{one}\n{resumed}"


@pytest.mark.parametrize("flags", [{"-v": 1, "-m": 100000}, {"-n": 1, "-nk": 2}],
                         ids=["validation", "checkpoints"])
def test_spd_677_sigterm_during_other_work(
    lab: Lab, bf16: Trainer, tmp_path: Path, flags: dict
) -> None:
    for pause in (0.0, 0.01, 0.03):
        out = tmp_path / f"out_{pause}"
        args = lab.args(8, {"-x": 1000000, "-n": 500000, "-o": out, **flags})
        with Ranks(bf16, 2, "tcp", args, lab.folder) as ranks:
            ranks.wait_for_step(2)
            time.sleep(pause)
            ranks.signal(1, signal.SIGTERM)
            run = ranks.wait(30)
        assert_all_end_well(run)
        newest = checkpoints(out)[-1]
        assert f"stopped after {newest} steps" in run.first.stdout, f"{run}"
        assert len(list(out.glob(f"state_{newest:08d}_*.bin"))) == 2


def test_sigterm_without_an_output_folder(lab: Lab, bf16: Trainer) -> None:
    with Ranks(bf16, 2, "tcp", long_run(lab), lab.folder) as ranks:
        ranks.wait_for_step(2)
        ranks.signal(1, signal.SIGTERM)
        run = ranks.wait(30)
    assert set(run.statuses) == {128 + signal.SIGTERM}, f"{run}"


@pytest.mark.parametrize("with_output", [True, False], ids=["saved", "not saved"])
def test_the_signal_of_another_rank_was_not_named(
    lab: Lab, bf16: Trainer, tmp_path: Path, with_output: bool
) -> None:
    """And the status is that signal's on every rank."""
    with Ranks(bf16, 4, "tcp", long_run(lab, tmp_path / "out" if with_output else None),
               lab.folder) as ranks:
        ranks.wait_for_step(2)
        ranks.signal(2, signal.SIGINT)
        run = ranks.wait(30)
    assert "SIGINT to rank 2: stopped after" in run.first.stdout, f"{run}"
    assert set(run.statuses) == {0 if with_output else 128 + signal.SIGINT}, f"{run}"


def limit_files(kib: int) -> list[str]:
    """Command before the trainer's under which no file grows beyond so many KiB: a full disk."""
    return ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", ["state of rank 1", "model"])
def test_awsome_1225_a_checkpoint_that_one_rank_cannot_write(
    lab: Lab, fp32: Trainer, tmp_path: Path, way: str, which: str
) -> None:
    """Non-zero on all ranks, and the old checkpoint stays whole."""
    out = tmp_path / "out"
    first = lab.args(8, {"-x": 2, "-n": 2, "-o": out})
    train_ranks(fp32, 4, "tcp", first, lab.folder)
    before = {name: entry for name, entry in snapshot(out).items() if f"{2:08d}" in name}
    path = model_path(out, 2) if which == "model" else state_path(out, 2, 1)
    kib = path.stat().st_size // 1024 - 1
    victim = 0 if which == "model" else 1
    assert which != "model" or state_path(out, 2, 0).stat().st_size < 1024 * kib
    args = lab.args(8, {"-x": 4, "-n": 2, "-o": out, "-y": 1})
    run = run_ranks(fp32, 4, way, args, lab.folder,
                    prefix=lambda rank: limit_files(kib) if rank == victim else [])
    assert_all_refused(run, path.name.replace(f"{2:08d}", f"{4:08d}"), "File too large")
    after = snapshot(out)
    assert {name: entry for name, entry in after.items() if f"{2:08d}" in name} == before
    assert checkpoints(out) == [2]
    assert not [name for name in after if name.endswith(".tmp")], f"{sorted(after)}"
    resumed = train_ranks(fp32, 4, "tcp", args, lab.folder)
    assert resumed.first.hash == lab.one(fp32, lab.args(8, {"-x": 4})).hash


def test_a_log_that_cannot_be_written_ends_all_ranks(
    lab: Lab, bf16: Trainer, tmp_path: Path
) -> None:
    args = lab.args(8, {"-x": 5000, "-o": tmp_path / "out"})
    run = run_ranks(bf16, 2, "tcp", args, lab.folder, prefix=limit_files(4))
    assert_all_refused(run, "main.log", "File too large")


@pytest.mark.parametrize("way", WAYS)
def test_output_folder_that_cannot_be_made(
    lab: Lab, bf16: Trainer, tmp_path: Path, way: str
) -> None:
    (tmp_path / "file").touch()
    args = lab.args(8, {"-o": tmp_path / "file" / "out"})
    run = run_ranks(bf16, 2, way, args, lab.folder)
    assert_all_refused(run, "-o", "file/out")


def test_checkpoint_of_another_model_is_refused_by_all(
    lab: Lab, bf16: Trainer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train_ranks(bf16, 2, "tcp", lab.args(8, {"-x": 2, "-n": 2, "-o": out}), lab.folder)
    before = snapshot(out)
    flags = {"-x": 4, "-n": 2, "-o": out, "-y": 1, "-e": "custom:L1C32H2T32V256"}
    run = run_ranks(bf16, 2, "tcp", lab.args(8, flags), lab.folder)
    assert_all_refused(run, "-e")
    assert snapshot(out) == before


def test_a_state_file_that_is_missing(lab: Lab, bf16: Trainer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train_ranks(bf16, 4, "tcp", lab.args(8, {"-x": 2, "-n": 2, "-o": out}), lab.folder)
    state_path(out, 2, 3).unlink()
    run = run_ranks(bf16, 2, "tcp", lab.args(8, {"-x": 4, "-o": out, "-y": 1}), lab.folder)
    assert_all_refused(run, state_path(out, 2, 3).name)
