"""It learns, it agrees with the reference, and it keeps books."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from helpers import (
    HEADER_BYTES,
    HEADER_INTS,
    REFERENCE,
    SHAPE,
    Trainer,
    Workplace,
    model_path,
    random_weights,
    read_model,
    snapshot,
    write_model,
    write_tokens,
)

# ------------------------------------------------------------------------------------ learning


def test_one_batch_is_learnt_by_heart(trainer: Trainer, work: Workplace) -> None:
    result = trainer.train(work.args({"-a": 1, "-x": 100, "-l": 5e-3}))
    assert result.losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.1)
    assert result.losses[-1] < 0.1, f"{result}"


def test_validation_loss_falls(trainer: Trainer, work: Workplace) -> None:
    result = trainer.train(work.args({"-b": 8, "-d": 128, "-x": 60, "-l": 5e-3, "-v": 60}))
    first, last = map(float, result.val_losses())
    assert first == pytest.approx(math.log(SHAPE.vocab_size), abs=0.1)
    assert last < first - 0.5, f"{result}"


def test_bf16_learns_like_fp32(fp32: Trainer, bf16: Trainer, work: Workplace) -> None:
    args = work.args({"-b": 8, "-d": 128, "-x": 40})
    assert bf16.train(args).losses == pytest.approx(fp32.train(args).losses, abs=0.03)


# ----------------------------------------------------------------------------------- reference


def reference(
    work: Workplace, name: str, micro_batch: int, width: int
) -> tuple[list[object], list[dict]]:
    """A command that trains on the reference's batch, so many rows at a time, and its steps."""
    steps = json.loads((REFERENCE / f"{name}_steps.json").read_text())
    s = steps["settings"]
    batch, seq_len = s["batch"], s["seq_len"]
    state = REFERENCE / f"{name}_debug_state.bin"
    ints = np.frombuffer(state.read_bytes()[HEADER_BYTES:], dtype="<i4")
    x, y = ints[: batch * seq_len], ints[batch * seq_len : 2 * batch * seq_len]
    # All windows of this file are one batch: every step is an epoch.
    tokens = write_tokens(work.folder / "reference.bin", [*x, y[-1]])
    flags = {"-e": REFERENCE / f"{name}_model.bin", "-i": tokens, "-b": micro_batch, "-t": seq_len,
             "-d": batch * seq_len, "-x": len(steps["steps"]), "-l": s["learning_rate"],
             "-c": s["weight_decay"], "-rw": width}
    return work.args(flags), steps["steps"]


@pytest.mark.parametrize(
    "name, micro_batch, width", [("tiny", 2, 8), ("tiny", 1, 1), ("tiny", 1, 2), ("odd", 3, 8),
                                 ("odd", 1, 8)]
)
@pytest.mark.parametrize("precision, loss_error, norm_error", [("fp32", 5e-6, 1e-4),
                                                             ("bf16", 0.01, 0.01)])
def test_ten_steps_of_the_reference(
    request: pytest.FixtureRequest, work: Workplace, name: str, micro_batch: int, width: int,
    precision: str, loss_error: float, norm_error: float,
) -> None:
    """Loss, gradient norm and learning rate of ten AdamW steps, computed by PyTorch in double."""
    args, steps = reference(work, name, micro_batch, width)
    result = request.getfixturevalue(precision).train(args)
    assert result.losses == pytest.approx([s["loss"] for s in steps], abs=loss_error)
    norms = [float(step.norm) for step in result.steps]
    assert norms == pytest.approx([s["norm"] for s in steps], rel=norm_error)
    rates = [float(step.lr) for step in result.steps]
    assert rates == pytest.approx([s["learning_rate"] for s in steps])


def test_reference_header_is_llmc_s() -> None:
    """The files themselves: header numbers and sizes that add up."""
    for name in ("tiny", "odd"):
        shape, version, weights = read_model(REFERENCE / f"{name}_model.bin")
        assert version == 3
        data = (REFERENCE / f"{name}_debug_state.bin").read_bytes()
        magic, version, batch, seq_len = np.frombuffer(data, dtype="<i4", count=4)
        assert (magic, version) == (20240327, 2)
        parameters = sum(tensor.size for tensor in weights.values())
        rows = int(batch) * int(seq_len)
        numbers = HEADER_INTS + 2 * rows + rows * shape.vocab_size + 1 + parameters
        assert len(data) == 4 * numbers


# ------------------------------------------------------------------------------ skipped updates


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_the_weights_skips_the_step_and_says_so(
    trainer: Trainer, work: Workplace, poison: float
) -> None:
    weights = random_weights(SHAPE)
    weights["fcw"][1, 3, 5] = poison
    model = write_model(work.folder / "model.bin", SHAPE, weights)
    result = trainer.run(work.args({"-e": model, "-x": 2, "-o": work.out, "-n": 2}, "--hash"))
    assert result.status == 0, f"{result}"
    assert result.skipped == [1, 2], f"{result}"
    assert result.stdout.count("not finite") == 2, f"{result}"
    untouched = trainer.run(work.args({"-e": model, "-x": 0}, "--hash"))
    assert result.hash == untouched.hash, "a skipped step changed weights"
    _, _, after = read_model(model_path(work.out, 2))
    for name, tensor in weights.items():
        if trainer.precision == "fp32":
            assert np.array_equal(after[name], tensor, equal_nan=True), name


def test_outlier_steps_are_skipped_and_said(trainer: Trainer, work: Workplace) -> None:
    """128 steps fill the window; every loss above the mean is then an outlier at z > 0.01."""
    flags = {"-sl": 0.01, "-l": 1e-5, "-o": work.out, "-y": 1}
    first = trainer.train(work.args({"-x": 140, "-n": 140, **flags}))
    assert first.skipped and min(first.skipped) > 128, f"{first}"
    skipped = trainer.train(work.args({"-x": 150, "-n": 1, **flags})).skipped
    assert 0 < len(skipped) < 10
    for step in range(141, 151):
        before = model_path(work.out, step - 1).read_bytes()
        assert (model_path(work.out, step).read_bytes() == before) == (step in skipped), step


# -------------------------------------------------------------------------- edges of the loop


def test_llmc_no_division_by_zero(trainer: Trainer, work: Workplace) -> None:
    result = trainer.train(work.args({"-v": 0, "-s": 0, "-x": 1, "-k": None, "-o": work.out,
                                      "-n": 0, "-lg": -1}))
    assert len(result.steps) == 1
    assert "nan" not in result.stdout and "inf " not in result.stdout, f"{result}"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 1), (1, 5), (2, 2), (3, 3)])
def test_shortest_schedules(
    fp32: Trainer, work: Workplace, schedule: str, steps: int, warmup: int
) -> None:
    flags = {"-k": schedule, "-x": steps, "-u": warmup, "-q": 0.1}
    result = fp32.train(work.args(flags))
    assert len(result.steps) == steps
    for step in result.steps:
        assert 0 < float(step.lr) <= 1e-3 * 1.001, f"{result}"


def test_sequence_of_one_token(trainer: Trainer, work: Workplace) -> None:
    assert len(trainer.train(work.args({"-b": 1, "-t": 1, "-d": 1})).steps) == 3


def test_one_layer_one_head_one_window(trainer: Trainer, work: Workplace) -> None:
    tokens = write_tokens(work.folder / "few.bin", range(17))
    args = work.args({"-e": "custom:L1C8H1T16V17", "-i": tokens, "-b": 1, "-d": 16})
    assert len(trainer.train(args).steps) == 3


def test_more_steps_than_an_epoch(fp32: Trainer, work: Workplace) -> None:
    result = fp32.train(work.args({"-x": 130}))  # 125 windows, 2 a step
    assert [step.step for step in result.steps] == list(range(1, 131))


def test_a_batch_of_the_whole_data_set(fp32: Trainer, work: Workplace) -> None:
    assert len(fp32.train(work.args({"-b": 125, "-d": 2000})).steps) == 3


def test_first_loss_does_not_depend_on_padding(fp32: Trainer, work: Workplace) -> None:
    """Logits of padding rows are no part of softmax."""
    tokens = write_tokens(work.folder / "t130.bin", np.arange(2001) % 130)
    args = work.args({"-e": "custom:L2C32H2T32V130", "-i": tokens, "-j": tokens, "-x": 1})
    assert fp32.train(args).losses[0] == pytest.approx(math.log(130), abs=0.1)


# ----------------------------------------------------------------------------------------- books


def test_step_lines(fp32: Trainer, work: Workplace) -> None:
    result = fp32.train(work.args({"-x": 12}))
    assert [(step.step, step.of) for step in result.steps] == [(i, 12) for i in range(1, 13)]
    for step in result.steps:
        assert "n/a" in step.mfu, f"a CPU has no known peak: {step}"
        assert "-100" not in step.mfu
        assert re.fullmatch(r"\d+\.\d{6}", step.loss)
        assert re.fullmatch(r"\d+\.\d{4}", step.norm)


def test_log_file(trainer: Trainer, work: Workplace) -> None:
    """llm.c's lines: s:STEP tel:validation loss, s:STEP trl:training loss lr:… norm:…"""
    result = trainer.train(work.args({"-x": 4, "-v": 2, "-o": work.out}))
    lines = (work.out / "main.log").read_text().splitlines()
    for line in lines:
        assert re.fullmatch(r"s:\d+ (tel|eval|trl):\S+( \w+:\S+)*", line), line
    trained = [line for line in lines if " trl:" in line]
    validated = [line for line in lines if " tel:" in line]
    assert len(trained) == 4 and len(validated) == len(result.val_losses()) == 3
    for line, step in zip(trained, result.steps):
        fields = dict(field.split(":") for field in line.split())
        assert float(fields["trl"]) == pytest.approx(float(step.loss), abs=6e-5)
        assert float(fields["norm"]) == pytest.approx(float(step.norm), abs=6e-3)
        assert float(fields["lr"]) == pytest.approx(float(step.lr), abs=1e-6)
    for line, loss in zip(validated, result.val_losses()):
        assert float(line.split("tel:")[1].split()[0]) == pytest.approx(float(loss), abs=6e-5)


def test_a_new_run_does_not_mix_with_an_old_log(fp32: Trainer, work: Workplace) -> None:
    """A run that starts at step 0 leaves one record a step, or says that the old log is kept."""
    fp32.train(work.args({"-x": 4, "-o": work.out}))
    result = fp32.train(work.args({"-x": 2, "-o": work.out}))
    lines = (work.out / "main.log").read_text().splitlines()
    assert len(lines) == 2 or [line for line in result.warnings if "main.log" in line], f"{result}"


def test_run_json(trainer: Trainer, work: Workplace) -> None:
    odd_name = write_tokens(work.folder / 'a "quoted" \\ nämé.bin', range(256))
    args = work.args({"-o": work.out, "-x": 1, "-i": odd_name})
    result = trainer.train(args)
    record = json.loads((work.out / "run.json").read_text())
    assert record["command_line"] == result.command
    assert record["build"]["precision"].lower() == trainer.precision
    assert record["options"]["train_data"] == str(odd_name)
    assert record["options"]["batch_size"] == 2
    assert record["options"]["learning_rate"] == 1e-3
    assert record["num_processes"] == 1
    assert record["device"]


def test_run_json_says_what_the_run_used(fp32: Trainer, work: Workplace) -> None:
    """It had -z 2 and -ge 2 as asked, where neither was used, and nothing of the table."""
    flags = {"-o": work.out, "-x": 1, "-z": 2, "-ge": 2}
    result = fp32.train(work.args(flags))
    record = json.loads((work.out / "run.json").read_text())
    assert record["options"]["zero_stage"] == record["options"]["gelu_fusion"] == 2
    assert record["options_in_use"] == {"zero_stage": 0, "gelu_fusion": 0}
    assert record["plan"]["processes"] == "1, ZeRO stage 0" and len(record["plan"]) > 10
    for name, text in record["plan"].items():
        assert f"| {name:27} | {text:62} |" in result.stdout.splitlines()
    for flag in ("-z zero_stage", "-ge gelu_fusion"):
        assert f"| {flag:27} | {'0 (2 asked)':62} |" in result.stdout.splitlines()


def test_run_json_of_a_resumed_run(fp32: Trainer, work: Workplace) -> None:
    """Each start has its record; the first stays as it is."""
    fp32.train(work.args({"-x": 2, "-o": work.out, "-n": 2}))
    first = (work.out / "run.json").read_bytes()
    fp32.train(work.args({"-x": 4, "-o": work.out, "-n": 2, "-y": 1}))
    assert (work.out / "run.json").read_bytes() == first
    assert json.loads((work.out / "run.1.json").read_text())["options"]["resume"] is True


def test_nothing_is_written_without_o(trainer: Trainer, work: Workplace) -> None:
    before = snapshot(work.folder)
    trainer.train(work.args({"-n": 1, "-v": 1}), cwd=work.folder)
    assert snapshot(work.folder) == before


def test_output_comes_line_by_line(fp32: Trainer, work: Workplace) -> None:
    """Through a pipe, too: who watches a log sees a step when it is done."""
    process = fp32.start(work.args({"-x": 1000000}))
    try:
        for line in process.stdout:
            if line.startswith("step"):
                break
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
