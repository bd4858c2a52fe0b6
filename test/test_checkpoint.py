"""Checkpoints: what is written, in which order, and that nothing can leave half of one behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest

from helpers import (
    HEADER_BYTES,
    MODEL_BF16,
    MODEL_FP32,
    SHAPE,
    Result,
    Trainer,
    Workplace,
    assert_checkpoint_whole,
    assert_refused,
    checkpoints,
    done_path,
    finish,
    make_tokens,
    model_path,
    read_model,
    snapshot,
    state_path,
    wait_for_a_step,
    wait_until,
    write_tokens,
)


def files_of(folder: Path, step: int) -> set[str]:
    return {path.name for path in folder.iterdir() if f"{step:08d}" in path.name}


def whole_set(step: int) -> set[str]:
    return {f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"DONE_{step:08d}"}


# ------------------------------------------------------------------------------ what is written


def test_names_and_steps(trainer: Trainer, work: Workplace) -> None:
    """Every -n steps and after the last one."""
    trainer.train(work.args({"-x": 7, "-o": work.out, "-n": 3}))
    assert checkpoints(work.out) == [3, 6, 7]
    for step in (3, 6, 7):
        assert files_of(work.out, step) == whole_set(step)
        assert_checkpoint_whole(work.out, step)


def test_no_checkpoint_without_n(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out}))
    assert checkpoints(work.out) == []
    assert not list(work.out.glob("*.bin"))


def test_nothing_else_is_left_in_the_folder(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out, "-n": 3}))
    assert {path.name for path in work.out.iterdir()} == whole_set(3) | {"main.log", "run.json"}


def test_done_is_written_last(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-x": 4, "-o": work.out, "-n": 2}))
    for step in (2, 4):
        done = done_path(work.out, step).stat().st_mtime_ns
        for path in (model_path(work.out, step), state_path(work.out, step)):
            assert path.stat().st_mtime_ns <= done, f"{path.name} is younger than its DONE file"


def test_done_is_never_there_before_its_files(fp32: Trainer, work: Workplace) -> None:
    """Looks at the folder while checkpoints are being written."""
    process = fp32.start(work.args({"-x": 60, "-o": work.out, "-n": 1}))
    seen = 0
    while process.poll() is None:
        for step in checkpoints(work.out) if work.out.exists() else []:
            assert_checkpoint_whole(work.out, step)
            seen += 1
    assert finish(process).status == 0
    assert seen > 0


def test_model_file_has_the_builds_type(trainer: Trainer, work: Workplace) -> None:
    trainer.train(work.args({"-o": work.out, "-n": 3}))
    shape, version, weights = read_model(model_path(work.out, 3))
    assert shape == SHAPE
    assert version == (MODEL_FP32 if trainer.precision == "fp32" else MODEL_BF16)
    assert all(np.isfinite(tensor).all() for tensor in weights.values())
    assert not weights["wte"][SHAPE.vocab_size :].any()
    assert weights["wte"].std() == pytest.approx(0.02, rel=0.2)
    assert np.abs(weights["ln1w"] - 1).max() < 0.02


def test_padding_rows_stay_zero(trainer: Trainer, work: Workplace) -> None:
    tokens = write_tokens(work.folder / "t200.bin", make_tokens(2001, 200))
    args = work.args({"-e": "custom:L2C32H2T32V200", "-i": tokens, "-j": tokens, "-c": 0.1,
                      "-x": 8, "-o": work.out, "-n": 8})
    trainer.train(args)
    shape, _, weights = read_model(model_path(work.out, 8))
    assert (shape.vocab_size, shape.padded_vocab_size) == (200, 256)
    assert not weights["wte"][200:].any()
    assert weights["wte"][:200].all(axis=1).all()


@pytest.mark.parametrize("writer, reader", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"),
                                            ("bf16", "bf16")])
def test_model_file_can_be_given_to_e(
    request: pytest.FixtureRequest, work: Workplace, writer: str, reader: str
) -> None:
    a, b = request.getfixturevalue(writer), request.getfixturevalue(reader)
    a.train(work.args({"-o": work.out, "-n": 3}))
    again = work.folder / "again"
    args = work.args({"-e": model_path(work.out, 3), "-l": 0, "-x": 1, "-o": again, "-n": 1})
    b.train(args)
    _, _, before = read_model(model_path(work.out, 3))
    _, _, after = read_model(model_path(again, 1))
    for name, tensor in before.items():
        if reader == writer or reader == "fp32":  # bf16 fits into fp32
            assert np.array_equal(tensor, after[name]), name
        else:
            assert after[name] == pytest.approx(tensor, rel=2**-7, abs=0), name


def test_e_goes_on_from_where_training_was(trainer: Trainer, work: Workplace) -> None:
    trained = trainer.train(work.args({"-a": 1, "-x": 20, "-o": work.out, "-n": 20}))
    onward = trainer.train(work.args({"-a": 1, "-x": 1, "-e": model_path(work.out, 20)}))
    assert onward.losses[0] < trained.losses[-1] + 0.01
    assert onward.losses[0] < trained.losses[0] - 0.3


# ----------------------------------------------------------------------------- -nk and -nm


@pytest.mark.parametrize(
    "keep, major, left",
    [(0, 0, [2, 4, 6, 8, 10, 12]), (1, 0, [12]), (2, 0, [10, 12]), (99, 0, [2, 4, 6, 8, 10, 12]),
     (1, 4, [4, 8, 10, 12]), (2, 6, [6, 8, 10, 12]), (1, 1, [2, 4, 6, 8, 10, 12])],
)
def test_old_checkpoints_are_deleted(
    fp32: Trainer, work: Workplace, keep: int, major: int, left: list[int]
) -> None:
    fp32.train(work.args({"-x": 12, "-o": work.out, "-n": 2, "-nk": keep, "-nm": major}))
    assert checkpoints(work.out) == left
    names = {path.name for path in work.out.iterdir() if path.name != "run.json"} - {"main.log"}
    assert names == set().union(*(whole_set(step) for step in left))


def test_there_is_always_one_whole_checkpoint(fp32: Trainer, work: Workplace) -> None:
    """-nk 1 deletes the old one only once the new one is complete."""
    process = fp32.start(work.args({"-x": 60, "-o": work.out, "-n": 1, "-nk": 1}))
    started = False
    while process.poll() is None:
        # A checkpoint may go between the listing and the look, but never the only one.
        found = checkpoints(work.out) if work.out.exists() else []
        assert found or not started, "no complete checkpoint left"
        started = started or bool(found)
    assert finish(process).status == 0
    assert started


def test_a_strangers_files_are_left_alone(fp32: Trainer, work: Workplace) -> None:
    work.out.mkdir()
    names = ("notes.txt", "model_best.bin", "DONE_abc", "state_00000002_final.txt")
    for name in names:
        (work.out / name).write_text("mine")
    fp32.train(work.args({"-x": 6, "-o": work.out, "-n": 2, "-nk": 1}))
    for name in names[:3]:
        assert (work.out / name).read_text() == "mine"


# -------------------------------------------------------------------------------------- resume


def test_resume_takes_the_newest_complete_one(fp32: Trainer, work: Workplace) -> None:
    whole = fp32.train(work.args({"-x": 6, "-o": work.out, "-n": 2}, "--hash"))
    done_path(work.out, 6).unlink()
    resumed = fp32.train(work.args({"-x": 6, "-o": work.out, "-n": 2, "-y": 1}, "--hash"))
    assert [step.step for step in resumed.steps] == [5, 6]
    assert (resumed.hash, resumed.bits) == (whole.hash, whole.bits)
    assert checkpoints(work.out) == [2, 4, 6]


def test_resume_at_the_end_has_nothing_to_do(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out, "-n": 3}))
    before = {name: entry for name, entry in snapshot(work.out).items() if name.endswith(".bin")}
    result = fp32.train(work.args({"-o": work.out, "-n": 3, "-y": 1}))
    assert not result.steps
    after = {name: entry for name, entry in snapshot(work.out).items() if name.endswith(".bin")}
    assert after == before


def test_resume_appends_to_the_log(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-x": 2, "-o": work.out, "-n": 2}))
    first = (work.out / "main.log").read_text()
    fp32.train(work.args({"-x": 4, "-o": work.out, "-n": 2, "-y": 1}))
    assert (work.out / "main.log").read_text().startswith(first)


@pytest.fixture
def saved(fp32: Trainer, work: Workplace) -> Workplace:
    """A run of four steps with -d 128 (M = 4, W = 4) that has checkpoints at 2 and 4."""
    fp32.train(work.args({"-d": 128, "-x": 4, "-o": work.out, "-n": 2}))
    return work


def refuse_resume(trainer: Trainer, saved: Workplace, flags: dict, *needles: str) -> Result:
    before = snapshot(saved.folder)
    args = saved.args({"-d": 128, "-x": 6, "-o": saved.out, "-n": 2, "-y": 1, **flags})
    result = trainer.run(args)
    assert_refused(result, *needles)
    assert not result.steps
    assert snapshot(saved.folder) == before, f"files changed\n{result}"
    return result


@pytest.mark.parametrize(
    "flags, needles",
    [({"-b": 4}, ("-b", "4", "2")), ({"-b": 1}, ("-b", "1", "2")),
     ({"-t": 32}, ("-t", "32", "16")), ({"-t": 8}, ("-t", "8", "16")),
     ({"-d": 64}, ("-d", "64", "128")), ({"-d": 256}, ("-d", "256", "128")),
     ({"-rs": 7}, ("-rs", "7", "1337")),
     ({"-e": "custom:L2C48H2T32V256"}, ("-e",)), ({"-e": "custom:L3C32H2T32V256"}, ("-e",))],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict)
    else "",
)
def test_resume_with_other_flags(
    fp32: Trainer, saved: Workplace, flags: dict, needles: tuple[str, ...]
) -> None:
    refuse_resume(fp32, saved, flags, *needles)


def announced(trainer: Trainer, saved: Workplace, flags: dict, *needles: str) -> None:
    """Resumes, but says on one line that the bits will differ, and why."""
    args = saved.args({"-d": 128, "-x": 6, "-o": saved.out, "-n": 2, "-y": 1, **flags})
    result = trainer.train(args)
    notes = [line for line in result.stdout.splitlines() if line.startswith("note:")]
    assert len(notes) == 1 and all(needle in notes[0] for needle in needles), f"{result}"
    assert [step.step for step in result.steps] == [5, 6]


def test_resume_with_another_reduction_width(fp32: Trainer, saved: Workplace) -> None:
    announced(fp32, saved, {"-rw": 2}, "-rw 2", "-rw 8", "bits")


def test_resume_with_other_data(fp32: Trainer, saved: Workplace) -> None:
    other = write_tokens(saved.folder / "other.bin", make_tokens(1500, SHAPE.vocab_size, 9))
    announced(fp32, saved, {"-i": other}, "-i", "training files")


def test_resume_without_master_weights(bf16: Trainer, work: Workplace) -> None:
    bf16.train(work.args({"-d": 128, "-x": 4, "-o": work.out, "-n": 2}))
    announced(bf16, work, {"-w": 0}, "-w 0", "master weights")


def test_resume_with_master_weights_that_were_not_kept(bf16: Trainer, work: Workplace) -> None:
    bf16.train(work.args({"-d": 128, "-x": 4, "-o": work.out, "-n": 2, "-w": 0}))
    announced(bf16, work, {"-w": 1}, "-w 1", "master weights")


def test_resume_with_the_other_precision(bf16: Trainer, saved: Workplace) -> None:
    refuse_resume(bf16, saved, {}, "state_00000004_00000.bin", "FP32", "BF16")


def test_resume_takes_the_model_from_the_checkpoint(fp32: Trainer, saved: Workplace) -> None:
    """-e may be left out; training goes on from the checkpoint's weights, not from -e's."""
    args = saved.args({"-d": 128, "-x": 6, "-o": saved.out, "-n": 2, "-y": 1, "-e": None}, "--hash")
    resumed = fp32.train(args, cwd=saved.folder)
    whole = fp32.train(saved.args({"-d": 128, "-x": 6}, "--hash"))
    assert (resumed.hash, resumed.bits) == (whole.hash, whole.bits)


def test_a_new_run_does_not_mix_with_an_old_ones_checkpoints(
    fp32: Trainer, saved: Workplace
) -> None:
    refuse_resume(fp32, saved, {"-y": 0}, "-o", str(saved.out), "-y 1")


# --------------------------------------------------------------------------- damaged checkpoints


def test_truncated_state_file(fp32: Trainer, saved: Workplace) -> None:
    path = state_path(saved.out, 4)
    for size in (path.stat().st_size - 1, path.stat().st_size // 2, HEADER_BYTES, 100, 0):
        os.truncate(path, size)
        refuse_resume(fp32, saved, {}, path.name)


def test_state_file_with_more_at_its_end(fp32: Trainer, saved: Workplace) -> None:
    path = state_path(saved.out, 4)
    with open(path, "ab") as file:
        file.write(bytes(4))
    refuse_resume(fp32, saved, {}, path.name)


@pytest.mark.parametrize("seed", range(12))
def test_one_flipped_bit_in_the_state_file(fp32: Trainer, saved: Workplace, seed: int) -> None:
    path = state_path(saved.out, 4)
    data = bytearray(path.read_bytes())
    rng = random.Random(seed)
    # A third each in the header, in what follows it, and at the end.
    low, high = [(0, 128), (1024, len(data)), (len(data) - 64, len(data))][seed % 3]
    data[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    refuse_resume(fp32, saved, {}, path.name)


@pytest.mark.parametrize("seed", range(4))
def test_one_flipped_bit_in_the_model_file(fp32: Trainer, saved: Workplace, seed: int) -> None:
    path = model_path(saved.out, 4)
    data = bytearray(path.read_bytes())
    rng = random.Random(seed)
    data[rng.randrange(HEADER_BYTES, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    refuse_resume(fp32, saved, {}, path.name)


@pytest.mark.parametrize("which", [model_path, state_path])
def test_missing_file_of_a_complete_checkpoint(fp32: Trainer, saved: Workplace, which) -> None:
    which(saved.out, 4).unlink()
    refuse_resume(fp32, saved, {}, which(saved.out, 4).name)


@pytest.mark.parametrize("which", [model_path, state_path])
def test_files_of_another_step(fp32: Trainer, saved: Workplace, which) -> None:
    shutil.copy(which(saved.out, 2), which(saved.out, 4))
    refuse_resume(fp32, saved, {}, which(saved.out, 4).name)


def test_after_a_damaged_one_an_older_one_can_be_taken(fp32: Trainer, saved: Workplace) -> None:
    os.truncate(state_path(saved.out, 4), 5000)
    done_path(saved.out, 4).unlink()
    args = saved.args({"-d": 128, "-x": 4, "-o": saved.out, "-n": 2, "-y": 1})
    assert [step.step for step in fp32.train(args).steps] == [3, 4]
    assert_checkpoint_whole(saved.out, 4)


# --------------------------------------------------------------------- kill, stop, full disk


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_kill_9_and_resume(trainer: Trainer, work: Workplace) -> None:
    """The killed and resumed run ends with the bits of the one that was left alone."""
    whole = trainer.train(work.args({"-x": 20}, "--hash"))
    args = work.args({"-x": 20, "-o": work.out, "-n": 10}, "--hash")
    process = trainer.start(work.args({"-x": 100000, "-o": work.out, "-n": 10}))
    wait_until(process, lambda: done_path(work.out, 10).exists())
    kill(process)
    for step in checkpoints(work.out)[1:]:
        done_path(work.out, step).unlink()  # it may have come further
    resumed = trainer.train([*args, "-y", 1])
    assert resumed.numbers == whole.numbers[10:]
    assert (resumed.hash, resumed.bits) == (whole.hash, whole.bits)


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_any_moment(fp32: Trainer, work: Workplace, seed: int) -> None:
    """Starts, kills and resumes over and over, a checkpoint every step. What DONE says is whole."""
    rng = random.Random(seed)
    steps = 400
    args = work.args({"-x": steps, "-o": work.out, "-n": 1, "-nk": 3, "-y": 1}, "--hash")
    reached = 0
    for _ in range(8):
        process = fp32.start(args)
        first = reached
        wait_until(process, lambda: any(step > first for step in checkpoints(work.out))
                   if work.out.exists() else False)
        time.sleep(rng.uniform(0, 0.02))
        kill(process)
        found = checkpoints(work.out)
        assert found and found[-1] > reached, "fell back behind a complete checkpoint"
        reached = found[-1]
        for step in found[-3:]:
            assert_checkpoint_whole(work.out, step)
        if reached >= steps:
            break
    last = reached + 2
    resumed = fp32.train(work.args({"-x": last, "-o": work.out, "-n": 1, "-y": 1}, "--hash"))
    whole = fp32.train(work.args({"-x": last}, "--hash"))
    assert [step.step for step in resumed.steps] == [last - 1, last]
    assert (resumed.hash, resumed.bits) == (whole.hash, whole.bits)


def test_leftovers_of_a_kill_are_cleared_or_ignored(fp32: Trainer, work: Workplace) -> None:
    """Files of a checkpoint that never became complete are written over."""
    fp32.train(work.args({"-x": 4, "-o": work.out, "-n": 2}))
    done_path(work.out, 4).unlink()
    model_path(work.out, 4).write_bytes(b"half")
    os.truncate(state_path(work.out, 4), 100)
    fp32.train(work.args({"-x": 4, "-o": work.out, "-n": 2, "-y": 1}))
    assert_checkpoint_whole(work.out, 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_writes_a_checkpoint(trainer: Trainer, work: Workplace, number: int) -> None:
    process = trainer.start(work.args({"-x": 100000, "-o": work.out, "-n": 50000}, "--hash"))
    wait_for_a_step(process, work.out)
    process.send_signal(number)
    result = finish(process, timeout=20)
    assert result.status == 0, f"{result}"
    (step,) = checkpoints(work.out)
    name = signal.Signals(number).name
    assert f"{name}: stopped after {step} steps; -y 1 goes on" in result.stdout
    assert_checkpoint_whole(work.out, step)
    assert result.steps[-1].step == step
    whole = trainer.train(work.args({"-x": step + 2}, "--hash"))
    args = work.args({"-x": step + 2, "-o": work.out, "-n": 50000, "-y": 1}, "--hash")
    resumed = trainer.train(args)
    assert (resumed.hash, resumed.bits) == (whole.hash, whole.bits)


def test_signal_without_an_output_folder(fp32: Trainer, work: Workplace) -> None:
    process = fp32.start(work.args({"-x": 100000}))
    process.stdout.readline()
    time.sleep(0.3)
    before = snapshot(work.folder)
    process.send_signal(signal.SIGTERM)
    result = finish(process, timeout=20)
    assert result.status in (128 + signal.SIGTERM, -signal.SIGTERM), f"{result}"
    assert snapshot(work.folder) == before


@pytest.mark.parametrize("flags", [{"-v": 1, "-m": 100000}, {"-s": 1, "-g": 16}, {"-n": 1}],
                         ids=["validation", "samples", "checkpoints"])
def test_spd_677_signal_during_other_work(fp32: Trainer, work: Workplace, flags: dict) -> None:
    for pause in (0.0, 0.003, 0.01, 0.02):
        out = work.folder / f"out_{pause}"
        args = work.args({"-x": 100000, "-n": 50000, "-nk": 2, "-o": out, **flags})
        process = fp32.start(args)
        wait_for_a_step(process, out)
        time.sleep(pause)
        process.send_signal(signal.SIGTERM)
        result = finish(process, timeout=20)
        assert result.status == 0, f"{result}"
        assert f"SIGTERM: stopped after {checkpoints(out)[-1]} steps" in result.stdout
        assert_checkpoint_whole(out, checkpoints(out)[-1])


def test_a_second_signal_ends_it_at_once(fp32: Trainer, work: Workplace) -> None:
    """Not later than the checkpoint takes, and what DONE says is whole."""
    process = fp32.start(work.args({"-x": 100000, "-o": work.out, "-n": 50000}))
    wait_for_a_step(process, work.out)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    finish(process, timeout=20)
    for step in checkpoints(work.out):
        assert_checkpoint_whole(work.out, step)


def file_size_limit(limit: int) -> list[str]:
    """Command before the trainer's under which no file can grow beyond `limit` bytes: to the
    program what a full disk is, and needs no root."""
    code = (
        "import os, resource, signal, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("size", ["model", "state"])
def test_checkpoint_that_cannot_be_written(trainer: Trainer, work: Workplace, size: str) -> None:
    """One line, no half files, and the old checkpoint is whole."""
    trainer.train(work.args({"-x": 2, "-o": work.out, "-n": 2}))
    before = {name: entry for name, entry in snapshot(work.out).items() if "0002" in name}
    paths = {"model": model_path, "state": state_path}
    limit = paths[size](work.out, 2).stat().st_size - 1
    args = work.args({"-x": 4, "-o": work.out, "-n": 2, "-y": 1}, "--hash")
    result = trainer.run(args, prefix=file_size_limit(limit))
    assert_refused(result, str(work.out), "00000004", "File too large")
    after = snapshot(work.out)
    assert {name: entry for name, entry in after.items() if "0002" in name} == before
    half = [name for name in after if "0004" in name and not name.endswith(".bin")]
    assert not half and checkpoints(work.out) == [2], f"{sorted(after)}"
    resumed = trainer.train(args)
    assert resumed.hash == trainer.train(work.args({"-x": 4}, "--hash")).hash


def test_log_that_cannot_be_written(fp32: Trainer, work: Workplace) -> None:
    args = work.args({"-x": 2000, "-o": work.out})
    result = fp32.run(args, prefix=file_size_limit(8192))
    assert_refused(result, "main.log", "File too large")


@pytest.mark.parametrize("run", range(3))
def test_no_crash_when_an_error_comes_while_the_update_still_runs(
    trainer: Trainer, work: Workplace, run: int
) -> None:
    """The host learns of loss and norm before AdamW is done; memory must outlive its streams."""
    # Hardly any forward pass, many weights to update.
    args = work.args({"-e": "custom:L1C128H1T16V4096", "-b": 1, "-t": 1, "-d": 1, "-x": 2000,
                      "-o": work.out})
    result = trainer.run(args, prefix=file_size_limit(4096))
    assert_refused(result, "main.log", "File too large")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB: a checkpoint of SHAPE in fp32 takes about 0.5 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs to mount a tmpfs, which only root may do")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_awsome_1225_disk_full(trainer: Trainer, work: Workplace, small_disk: Path) -> None:
    out = small_disk / "out"
    result = trainer.run(work.args({"-x": 20, "-o": out, "-n": 1}))
    assert_refused(result, str(out), "No space left on device")
    found = checkpoints(out)
    assert found, f"the first checkpoint fits\n{result}"
    for step in found:
        assert_checkpoint_whole(out, step)
    # With room again the run goes on from the last whole one.
    for path in out.iterdir():
        if not any(f"{found[-1]:08d}" in path.name for _ in (0,)):
            path.unlink()
    last = found[-1] + 1
    resumed = trainer.train(work.args({"-x": last, "-o": out, "-y": 1}, "--hash"))
    assert resumed.hash == trainer.train(work.args({"-x": last}, "--hash")).hash


def test_disk_full_leaves_no_half_files(fp32: Trainer, work: Workplace, small_disk: Path) -> None:
    out = small_disk / "out"
    fp32.run(work.args({"-x": 20, "-o": out, "-n": 1}))
    assert not [path.name for path in out.iterdir() if "tmp" in path.name or "part" in path.name]
    for path in out.glob("model_*.bin"):
        read_model(path)


def test_disk_full_while_logging(fp32: Trainer, work: Workplace, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1024 * 1024 - 3 * 4096))
    result = fp32.run(work.args({"-x": 2000, "-o": small_disk / "out"}))
    assert_refused(result, "No space left on device")


# ------------------------------------------------------------------------------ one folder, one run


def test_model_of_another_shape_in_the_checkpoint_is_refused(
    fp32: Trainer, work: Workplace
) -> None:
    """It was once read into buffers of the right model's size."""
    fp32.train(work.args({"-o": work.out, "-n": 3}))
    large = work.folder / "large"
    fp32.train(work.args({"-e": "custom:L3C64H2T32V256", "-o": large, "-n": 3}))
    shutil.copy(large / "model_00000003.bin", work.out / "model_00000003.bin")
    result = fp32.run(work.args({"-o": work.out, "-n": 3, "-x": 6, "-y": 1}))
    assert_refused(result, "model_00000003.bin", "DONE_00000003")


def test_an_earlier_runs_log_is_kept(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out}))
    first = (work.out / "main.log").read_text()
    for number, extra in ((1, {}), (2, {"-y": 1})):
        result = fp32.train(work.args({"-o": work.out, "-x": 2, **extra}))
        assert f"main.{number}.log" in result.stdout
    assert (work.out / "main.1.log").read_text() == first
    assert len((work.out / "main.2.log").read_text().splitlines()) == 2
    assert len((work.out / "main.log").read_text().splitlines()) == 2


def test_two_runs_in_one_folder(fp32: Trainer, work: Workplace) -> None:
    """The second is refused and touches nothing; the first goes on."""
    args = work.args({"-o": work.out, "-x": 100000, "-n": 1000000})
    first = fp32.start(args)
    wait_until(first, (work.out / "run.json").exists)
    result = fp32.run(work.args({"-o": work.out, "-x": 2}))
    assert_refused(result, str(work.out), "another run")
    assert not (work.out / "main.1.log").exists() and first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not list(work.out.glob("DONE_*"))
    fp32.train(work.args({"-o": work.out, "-x": 2}))  # the lock went with the process


def test_flags_that_change_results_are_announced(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out, "-n": 3}))
    changes = {"-l": 0.1, "-c": 0.3, "-k": "linear", "-q": 0.5, "-u": 2, "-sl": 3, "-sg": 4}
    result = fp32.train(work.args({"-o": work.out, "-x": 6, "-y": 1, **changes}))
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: -")]
    assert sorted(note.split()[1] for note in notes) == sorted([*changes, "-x"])


def test_checkpoints_without_a_folder_were_silently_not_saved(
    fp32: Trainer, work: Workplace
) -> None:
    before = snapshot(work.folder)
    result = fp32.train(work.args({"-n": 1}))
    notes = [line for line in result.stdout.splitlines() if line.startswith("note:")]
    assert notes == ["note: -n 1: without -o nothing is saved"]
    assert snapshot(work.folder) == before


def test_unfinished_files_of_a_killed_save_are_removed(fp32: Trainer, work: Workplace) -> None:
    work.out.mkdir()
    ours = [work.out / f"{name}.tmp" for name in ("model_00000007.bin", "state_00000007_00000.bin")]
    theirs = work.out / "notes.tmp"
    for path in [*ours, theirs]:
        path.write_bytes(b"half")
    fp32.train(work.args({"-o": work.out}))
    assert theirs.exists() and not any(path.exists() for path in ours)


def test_signal_during_a_long_sample(fp32: Trainer, work: Workplace) -> None:
    process = fp32.start(work.args({"-o": work.out, "-s": 1, "-g": 10000000, "-x": 3}))
    wait_for_a_step(process, work.out)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    result = finish(process, timeout=20)
    assert result.status == 0 and "SIGTERM" in result.stdout, f"{result}"
    assert checkpoints(work.out) == [1]


def test_interrupt_of_a_run_that_a_shell_started_in_the_background(
    fp32: Trainer, work: Workplace
) -> None:
    """Shells ignore SIGINT in background jobs; sent to the run itself it counts all the same."""
    ignoring = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
    process = fp32.start(work.args({"-o": work.out, "-x": 100000}), prefix=ignoring)
    wait_until(process, (work.out / "run.json").exists)
    process.send_signal(signal.SIGHUP)  # ignored, as under nohup
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "SIGINT: stopped" in finish(process, timeout=20).stdout
