"""The same command gives the same bits, and so does everything that must not change them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from helpers import (
    SHAPE,
    Result,
    Trainer,
    Workplace,
    checkpoints,
    make_tokens,
    model_path,
    state_path,
    write_tokens,
)


def assert_same_bits(a: Result, b: Result) -> None:
    """All step lines, and at the end every bit of weights, optimizer state, loss and norm."""
    assert a.numbers, f"no step line\n{a}"
    assert a.numbers == b.numbers, f"other numbers\n{a}\n{b}"
    assert a.hashes and a.hashes == b.hashes, f"other weights\n{a}\n{b}"
    assert a.bits == b.bits, f"other optimizer state\n{a}\n{b}"


def one_core() -> list[str]:
    core = min(os.sched_getaffinity(0))
    return ["taskset", "-c", str(core)]


ACCUMULATE = {"-d": 512, "-x": 4}  # M = 16 micro-batches of 2 * 16 tokens, W = 8
OPTIONS = {
    "plain": {},
    "M=16 W=8": ACCUMULATE,
    "M=16 W=16": {**ACCUMULATE, "-rw": 16},
    "M=16 W=1": {**ACCUMULATE, "-rw": 1},
    "M=12 W=4": {"-d": 384, "-x": 4},
    "M=3 W=1": {"-d": 96, "-x": 4},
    "no master weights": {"-w": 0},
    "one batch": {"-a": 1},
    "one sequence": {"-b": 1, "-d": 16},
    "odd sizes": {"-b": 3, "-t": 13, "-d": 78},
    "ZeRO-1": {"-z": 1},
    "cosine and decay": {"-k": "cosine", "-q": 0.1, "-u": 2, "-c": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_twice(trainer: Trainer, work: Workplace, name: str) -> None:
    args = work.args({"-x": 6, **OPTIONS[name]}, "--hash")
    assert_same_bits(trainer.train(args), trainer.train(args))


@pytest.mark.parametrize("name", ["plain", "M=16 W=8", "odd sizes"])
def test_one_core_and_all(trainer: Trainer, work: Workplace, name: str) -> None:
    args = work.args({"-x": 6, **OPTIONS[name]}, "--hash")
    assert_same_bits(trainer.train(args), trainer.train(args, prefix=one_core()))


@pytest.mark.parametrize("name", ["plain", "M=16 W=8"])
def test_matrices_large_enough_for_several_threads(
    trainer: Trainer, work: Workplace, name: str
) -> None:
    flags = {"-e": "custom:L2C128H2T32V256", "-t": 32, "-b": 4, "-x": 2}
    flags["-d"] = 128 if name == "plain" else 1024
    args = work.args(flags, "--hash")
    assert_same_bits(trainer.train(args), trainer.train(args, prefix=one_core()))


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_thread_counts_in_the_environment(trainer: Trainer, work: Workplace, threads: str) -> None:
    args = work.args({"-e": "custom:L2C128H2T32V256", "-t": 32, "-b": 4, "-d": 128}, "--hash")
    env = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    assert_same_bits(trainer.train(args), trainer.train(args, env=env))


@pytest.mark.parametrize("name", ["plain", "M=16 W=8"])
def test_recompute_levels(trainer: Trainer, work: Workplace, name: str) -> None:
    runs = [
        trainer.train(work.args({"-x": 6, **OPTIONS[name], "-r": level}, "--hash"))
        for level in (0, 1, 2)
    ]
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


def test_openblas_core_type(trainer: Trainer, work: Workplace) -> None:
    args = work.args({"-x": 6}, "--hash")
    env = {"OPENBLAS_CORETYPE": "HASWELL"}
    assert_same_bits(trainer.train(args, env=env), trainer.train(args, env=env))
    assert_same_bits(trainer.train(args, env=env), trainer.train(args, env=env, prefix=one_core()))


def test_an_empty_core_type_counts_as_none(fp32: Trainer, work: Workplace) -> None:
    """OpenBLAS took it for a wish, and a core of its own, with other bits."""
    unset = fp32.run(work.args({}, "--hash"), prefix=["env", "-u", "OPENBLAS_CORETYPE"])
    empty = fp32.run(work.args({}, "--hash"), env={"OPENBLAS_CORETYPE": ""})
    assert unset.status == empty.status == 0 and unset.hash == empty.hash, f"{unset}\n{empty}"


def test_locale_and_folder_do_not_matter(trainer: Trainer, work: Workplace, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for i, name in enumerate(("B_1.bin", "a_1.bin", "Z_1.bin", "_1.bin")):
        write_tokens(shards / name, make_tokens(200, SHAPE.vocab_size, i))
    args = work.args({"-i": shards / "*_1.bin", "-x": 8}, "--hash")
    plain = trainer.train(args, env={"LC_ALL": "C"})
    assert_same_bits(plain, trainer.train(args, env={"LC_ALL": "en_US.UTF-8", "TZ": "Asia/Tokyo"}))
    moved = shards.rename(tmp_path / "moved")
    args = work.args({"-i": moved / "*_1.bin", "-x": 8}, "--hash")
    assert_same_bits(plain, trainer.train(args, cwd=tmp_path))


def test_llmc_442_batch_of_one_repeated_token(trainer: Trainer, work: Workplace) -> None:
    same = write_tokens(work.folder / "same.bin", [7] * 2001)
    args = work.args({"-i": same, "-b": 4, "-d": 128, "-x": 6}, "--hash")
    assert_same_bits(trainer.train(args), trainer.train(args))


def test_what_only_watches_does_not_touch_the_weights(trainer: Trainer, work: Workplace) -> None:
    """Validation, samples, checkpoints and logs on or off: the same training."""
    bare = trainer.train(work.args({"-x": 6}, "--hash"))
    watched = trainer.train(
        work.args({"-x": 6, "-v": 1, "-m": 3, "-s": 2, "-g": 5, "-o": work.out, "-n": 2, "-lg": 1},
                  "--hash")
    )
    assert_same_bits(bare, watched)


@pytest.mark.parametrize("name", ["plain", "M=16 W=8", "odd sizes"])
def test_nothing_is_read_before_it_is_written(
    trainer: Trainer, work: Workplace, name: str
) -> None:
    """LLMC_POISON fills all memory with NaN at the start."""
    flags = {**OPTIONS[name], "-x": 4, "-v": 2, "-s": 2, "-g": 5}
    args = work.args(flags, "--hash")
    assert_same_bits(trainer.train(args), trainer.train(args, env={"LLMC_POISON": "1"}))


def test_micro_batch_size_hardly_matters(fp32: Trainer, work: Workplace) -> None:
    """-b and -rw change the order of sums, not what is summed: losses and norms agree to rounding,
    whether micro-batches accumulate in one buffer, go through the tree, or both."""
    whole = fp32.train(work.args({"-b": 16, "-d": 256, "-x": 5}))
    for batch, width in ((1, 1), (1, 2), (1, 4), (1, 16), (2, 8), (2, 2), (4, 1), (8, 2)):
        parts = fp32.train(work.args({"-b": batch, "-d": 256, "-x": 5, "-rw": width}))
        assert parts.losses == pytest.approx(whole.losses, abs=2e-5), f"-b {batch} -rw {width}"
        norms = [[float(step.norm) for step in run.steps] for run in (parts, whole)]
        assert norms[0] == pytest.approx(norms[1], rel=3e-4), f"-b {batch} -rw {width}"


def test_two_runs_that_differ_are_told_apart(trainer: Trainer, work: Workplace) -> None:
    """The comparison itself: another seed changes losses and hashes."""
    a = trainer.train(work.args({"-rs": 1}, "--hash"))
    b = trainer.train(work.args({"-rs": 2}, "--hash"))
    assert a.numbers != b.numbers
    assert a.hash != b.hash and a.bits != b.bits


# ------------------------------------------------------------------------------------- resume


def resume_at(
    trainer: Trainer, work: Workplace, flags: dict, middle: int, last: int
) -> tuple[Result, Result]:
    """`last` steps at once, and again from its own checkpoint at `middle`.

    Compares step lines, hashes and the final checkpoint's bytes.
    """
    first, second = work.folder / "first", work.folder / "second"
    flags = {**flags, "-x": last, "-n": middle}
    whole = trainer.train(work.args({**flags, "-o": first}, "--hash"))
    assert checkpoints(first) == sorted({*range(middle, last + 1, middle), last})
    second.mkdir()
    for path in first.iterdir():
        if f"{middle:08d}" in path.name:
            shutil.copy(path, second)
    resumed = trainer.train(work.args({**flags, "-o": second, "-y": 1}, "--hash"))

    assert resumed.numbers == whole.numbers[middle:], f"{whole}\n{resumed}"
    assert resumed.hash == whole.hash, f"{whole}\n{resumed}"
    assert resumed.bits == whole.bits, f"{whole}\n{resumed}"
    for path in (model_path, state_path):
        assert path(first, last).read_bytes() == path(second, last).read_bytes(), path.__name__
    return whole, resumed


@pytest.mark.parametrize(
    "name", ["plain", "M=16 W=8", "M=3 W=1", "no master weights", "one batch", "odd sizes",
             "cosine and decay"]
)
def test_llmc_522_702_ten_steps_resume_ten_steps(
    trainer: Trainer, work: Workplace, name: str
) -> None:
    resume_at(trainer, work, {**OPTIONS[name]}, middle=10, last=20)


def test_resume_with_every_recompute_level(trainer: Trainer, work: Workplace) -> None:
    whole = trainer.train(work.args({"-x": 6, "-o": work.out, "-n": 3, "-r": 0}, "--hash"))
    for path in work.out.iterdir():
        if "00000006" in path.name:
            path.unlink()
    resumed = trainer.train(
        work.args({"-x": 6, "-o": work.out, "-n": 3, "-r": 2, "-y": 1}, "--hash")
    )
    assert resumed.numbers == whole.numbers[3:]
    assert (resumed.hash, resumed.bits) == (whole.hash, whole.bits)


def shards(work: Workplace, windows: list[int], seq_len: int = 16) -> Path:
    """Files of so many windows each."""
    for i, count in enumerate(windows):
        tokens = make_tokens(count * seq_len + 1, SHAPE.vocab_size, seed=10 + i)
        write_tokens(work.folder / f"shard_{i}.bin", tokens)
    return work.folder / "shard_*.bin"


@pytest.mark.parametrize("middle", [1, 2, 3, 4, 5, 6, 8])
def test_nanogpt_467_resume_around_shard_and_epoch_ends(
    fp32: Trainer, work: Workplace, middle: int
) -> None:
    # 3 shards of 4, 2 and 6 windows, 2 a step: an epoch is 6 steps, and whatever their order is,
    # shards end at two of the steps below 6.
    pattern = shards(work, [4, 2, 6])
    resume_at(fp32, work, {"-i": pattern}, middle, last=9)


@pytest.mark.parametrize("middle", [2, 3, 4])
def test_resume_when_a_step_reaches_over_the_epochs_end(
    fp32: Trainer, work: Workplace, middle: int
) -> None:
    # 7 windows, 4 a step in two micro-batches: the ends of epochs fall inside steps and batches.
    pattern = shards(work, [4, 3])
    resume_at(fp32, work, {"-i": pattern, "-d": 64}, middle, last=8)


def test_resume_with_a_full_outlier_window(trainer: Trainer, work: Workplace) -> None:
    """The window's 128 values and what they skip are part of the state."""
    flags = {"-sl": 0.5, "-sg": 0.5, "-l": 1e-5}
    whole, _ = resume_at(trainer, work, flags, middle=135, last=150)
    assert max(whole.skipped) > 135, "no step was skipped after the resume: this tests nothing"


def test_resume_twice(trainer: Trainer, work: Workplace) -> None:
    once = trainer.train(work.args({"-x": 9}, "--hash"))
    parts = [
        trainer.train(work.args({"-x": last, "-o": work.out, "-n": 3, "-y": 1}, "--hash"))
        for last in (3, 6, 9)
    ]
    assert [numbers for part in parts for numbers in part.numbers] == once.numbers
    assert (parts[-1].hash, parts[-1].bits) == (once.hash, once.bits)


# ------------------------------------------------------------------------------------ data order


def test_llmc_792_an_epoch_covers_all_once(fp32: Trainer, work: Workplace) -> None:
    """With a learning rate of 0 the losses of an epoch have one sum, whatever the order."""
    pattern = shards(work, [5, 3, 4])
    flags = {"-i": pattern, "-b": 1, "-d": 16, "-l": 0, "-x": 24}
    losses = [step.loss for step in fp32.train(work.args(flags)).steps]
    first, second = losses[:12], losses[12:]
    assert len(set(first)) == 12, "windows with equal losses: this tests nothing"
    assert sorted(first) == sorted(second)
    assert first != second, "two epochs in the same order"


def test_the_seed_orders_the_data(fp32: Trainer, work: Workplace) -> None:
    from helpers import random_weights, write_model

    model = write_model(work.folder / "model.bin", SHAPE, random_weights(SHAPE))
    pattern = shards(work, [5, 3, 4])
    flags = {"-e": model, "-i": pattern, "-b": 1, "-d": 16, "-l": 0, "-x": 12}
    orders = [
        [step.loss for step in fp32.train(work.args({**flags, "-rs": seed})).steps]
        for seed in (1, 2)
    ]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_steps_do_not_depend_on_the_micro_batch(fp32: Trainer, work: Workplace) -> None:
    """Row b of micro-batch j is window j * B + b: the same windows in every step, whatever B is."""
    pattern = shards(work, [8, 8])
    losses = [
        fp32.train(work.args({"-i": pattern, "-b": b, "-d": 64, "-l": 0, "-x": 8})).losses
        for b in (1, 2, 4)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=3e-6)
    assert losses[2] == pytest.approx(losses[0], abs=3e-6)
