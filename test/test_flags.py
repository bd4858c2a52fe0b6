"""One test a flag: that it does what it says, seen in what the trainer does."""

from __future__ import annotations

import json
import math
import re
from typing import Callable

import numpy as np
import pytest

from helpers import (
    SHAPE,
    Result,
    Shape,
    Trainer,
    Workplace,
    assert_refused,
    checkpoints,
    make_tokens,
    model_path,
    random_weights,
    read_model,
    snapshot,
    state_path,
    write_eval,
    write_model,
    write_tokenizer,
    write_tokens,
)

COVERED: set[str] = set()


def covers(*flags: str) -> Callable:
    """Says which flags a test is about; test_no_flag_is_forgotten compares with --help."""
    COVERED.update(flags)
    return lambda test: test


def lr(result: Result) -> list[float]:
    return [float(step.lr) for step in result.steps]


# ------------------------------------------------------------------------------ data and model


@covers("-i")
def test_i_training_data(fp32: Trainer, work: Workplace) -> None:
    a = fp32.train(work.args({}, "--hash"))
    b = fp32.train(work.args({"-i": work.val}, "--hash"))
    assert a.hash != b.hash
    both = fp32.train(work.args({"-i": work.folder / "*.bin", "-x": -1}))
    alone = fp32.train(work.args({"-x": -1}))
    assert len(alone.steps) == 125 // 2  # 2001 tokens: 125 windows of 16, 2 a step
    assert len(both.steps) == (125 + 31) // 2


@covers("-j")
def test_j_validation_data(fp32: Trainer, work: Workplace) -> None:
    a = fp32.train(work.args({"-v": 3}, "--hash"))
    b = fp32.train(work.args({"-v": 3, "-j": work.train}, "--hash"))
    assert a.hash == b.hash
    assert a.val_losses() != b.val_losses()


@covers("-e")
def test_e_model_file_and_name(trainer: Trainer, work: Workplace) -> None:
    version = 3 if trainer.precision == "fp32" else 5
    weights = random_weights(SHAPE, seed=5)
    model = write_model(work.folder / "model.bin", SHAPE, weights, version)
    trainer.train(work.args({"-e": model, "-l": 0, "-x": 1, "-o": work.out, "-n": 1}))
    assert model_path(work.out, 1).read_bytes() == model.read_bytes()
    other = work.folder / "other"
    args = work.args({"-e": "custom:L1C24H3T40V256", "-x": 1, "-o": other, "-n": 1})
    trainer.train(args)
    assert read_model(model_path(other, 1))[0] == Shape(1, 24, 3, 40, 256)


@covers("-e")
@pytest.mark.parametrize(
    "name, layers, channels, heads, max_seq_len",
    [("d6", 6, 384, 6, 1024), ("gpt2:d6", 6, 384, 6, 1024), ("gpt3:c384", 6, 384, 6, 2048)],
)
def test_e_named_sizes(
    fp32: Trainer, work: Workplace, name: str, layers: int, channels: int, heads: int,
    max_seq_len: int,
) -> None:
    args = work.args({"-e": name, "-t": 4, "-b": 1, "-d": 4, "-x": 0}, "--dry-run")
    text = fp32.train(args).stdout
    for number in (layers, channels, heads, 50257):
        assert re.search(rf"\b{number}\b", text.replace(",", "")), f"{number} not in\n{text}"
    tokens = write_tokens(work.folder / "long.bin", make_tokens(2 * max_seq_len, SHAPE.vocab_size))
    longest = {"-e": name, "-b": 1, "-d": None, "-i": tokens}
    fp32.train(work.args({**longest, "-t": max_seq_len}, "--dry-run"))
    too_long = max_seq_len + 1
    result = fp32.run(work.args({**longest, "-t": too_long}, "--dry-run"))
    assert_refused(result, "-t", str(too_long), str(max_seq_len))


# -------------------------------------------------------------------------------------- output


@covers("-o")
def test_o_output_folder(fp32: Trainer, work: Workplace) -> None:
    before = snapshot(work.folder)
    fp32.train(work.args({}), cwd=work.folder)
    assert snapshot(work.folder) == before
    fp32.train(work.args({"-o": "here"}), cwd=work.folder)
    assert {path.name for path in (work.folder / "here").iterdir()} == {"main.log", "run.json"}


@covers("-n")
def test_n_checkpoint_every(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-x": 9, "-o": work.out, "-n": 4}))
    assert checkpoints(work.out) == [4, 8, 9]


@covers("-nk", "-nm")
def test_nk_nm_which_to_keep(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-x": 9, "-o": work.out, "-n": 1, "-nk": 2, "-nm": 3}))
    assert checkpoints(work.out) == [3, 6, 7, 8, 9]


@covers("-y")
def test_y_resume(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-x": 4, "-o": work.out, "-n": 4}))
    again = fp32.train(work.args({"-x": 6, "-o": work.out, "-n": 4, "-y": 1}))
    assert [step.step for step in again.steps] == [5, 6]
    assert_refused(fp32.run(work.args({"-x": 8, "-o": work.out, "-n": 4, "-y": 0})), "-y 1")


@covers("-lg")
def test_lg_is_only_a_log(fp32: Trainer, work: Workplace) -> None:
    """A line on the device every N steps, and no other number changes."""
    a = fp32.train(work.args({"-x": 4}, "--hash"))
    b = fp32.train(work.args({"-x": 4, "-lg": 2}, "--hash"))
    assert (a.numbers, a.hash) == (b.numbers, b.hash)
    extra = [re.match(r"step (\d+): ", line) for line in b.stdout.splitlines()]
    assert [int(found[1]) for found in extra if found] == [2, 4]


# ------------------------------------------------------------------------------------ training


@covers("-b")
def test_b_micro_batch(fp32: Trainer, work: Workplace) -> None:
    one = fp32.train(work.args({"-b": 1, "-d": 64}))
    four = fp32.train(work.args({"-b": 4, "-d": 64}))
    assert one.losses == pytest.approx(four.losses, abs=1e-5)
    alone = fp32.train(work.args({"-b": 4, "-d": None}))
    assert alone.numbers == four.numbers, "without -d a step is one micro-batch"


@covers("-t")
def test_t_sequence_length(fp32: Trainer, work: Workplace) -> None:
    short = fp32.train(work.args({"-t": 8, "-d": 16, "-x": -1}))
    long = fp32.train(work.args({"-t": 32, "-d": 64, "-x": -1}))
    assert len(short.steps) == 2000 // 8 // 2
    assert len(long.steps) == 2000 // 32 // 2


@covers("-d")
def test_d_total_batch(fp32: Trainer, work: Workplace) -> None:
    steps = {d: len(fp32.train(work.args({"-d": d, "-x": -1})).steps) for d in (32, 64, 320)}
    assert steps == {32: 62, 64: 31, 320: 6}
    own = fp32.train(work.args({"-d": -1}))
    assert own.numbers == fp32.train(work.args({"-d": 32})).numbers


@covers("-x")
def test_x_steps(fp32: Trainer, work: Workplace) -> None:
    for steps in (1, 5):
        assert len(fp32.train(work.args({"-x": steps})).steps) == steps
    assert not fp32.train(work.args({"-x": 0})).steps


def schedule(name: str, step: int, steps: int, base: float, warmup: int, final: float) -> float:
    """Learning rate of step 0, 1, ...: up to `base` over the warmup, then down, so that the last
    step has base * final; wsd stays up until the last fifth of all steps."""
    if step < warmup:
        return base * (step + 1) / warmup
    start = max(warmup, steps - steps // 5) if name == "wsd" else warmup
    progress = max(0.0, (step - start) / (steps - 1 - start))
    fall = {
        "constant": 0.0,
        "linear": progress,
        "cosine": 0.5 * (1 - math.cos(math.pi * progress)),
        "wsd": math.sqrt(progress),
    }[name]
    return base - fall * (base - base * final)


@covers("-k", "-u", "-q", "-l")
@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup, final", [(0, 0.1), (5, 0.0), (5, 1.0)])
def test_k_u_q_learning_rate(
    fp32: Trainer, work: Workplace, name: str, warmup: int, final: float
) -> None:
    flags = {"-k": name, "-u": warmup, "-q": final, "-x": 20, "-l": 2e-3}
    result = fp32.train(work.args(flags))
    expected = [schedule(name, step, 20, 2e-3, warmup, final) for step in range(20)]
    assert lr(result) == pytest.approx(expected, rel=6e-3, abs=1e-12)


def test_a_warmup_longer_than_the_run_was_not_said(fp32: Trainer, work: Workplace) -> None:
    for warmup, noted in ((4, False), (5, True)):
        result = fp32.train(work.args({"-u": warmup, "-x": 4, "-l": 2e-3}))
        note = f"note: -u {warmup}: the run ends at step 4, before the learning rate has reached -l"
        assert (note in result.stdout.splitlines()) == noted, result
        assert (lr(result)[-1] < 2e-3) == noted


@covers("-l")
def test_l_learning_rate(trainer: Trainer, work: Workplace) -> None:
    # bf16 weights are rounded anew from master weights at each step, so without these here.
    start = trainer.train(work.args({"-w": 0, "-x": 0}, "--hash")).hash
    still = trainer.train(work.args({"-w": 0, "-l": 0, "-x": 4}, "--hash"))
    assert still.hash == start
    moving = trainer.train(work.args({"-w": 0, "-l": 1e-4, "-x": 1}, "--hash"))
    assert moving.hash != start
    assert lr(moving) == [1e-4]


@covers("-c")
def test_c_weight_decay(fp32: Trainer, work: Workplace) -> None:
    """One step with decay c is one without, less lr * c * weight, on 2-D tensors alone."""
    weights = random_weights(SHAPE, seed=3)
    weights["lnfw"] += 1
    model = write_model(work.folder / "model.bin", SHAPE, weights)
    after = {}
    for decay in (0.0, 0.5):
        out = work.folder / f"decay_{decay}"
        fp32.train(work.args({"-e": model, "-x": 1, "-c": decay, "-o": out, "-n": 1}))
        after[decay] = read_model(model_path(out, 1))[2]
    for name, tensor in weights.items():
        decayed = name in ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")
        expected = -1e-3 * 0.5 * tensor if decayed else np.zeros_like(tensor)
        assert after[0.5][name] - after[0.0][name] == pytest.approx(expected, abs=3e-7), name


@covers("-sl", "-sg")
@pytest.mark.parametrize("flag", ["-sl", "-sg"])
def test_sl_sg_skip_outliers(fp32: Trainer, work: Workplace, flag: str) -> None:
    runs = {
        z: fp32.train(work.args({"-x": 160, "-l": 1e-5, flag: z}, "--hash")) for z in (0, 50, 0.5)
    }
    assert not runs[0].skipped and not runs[50].skipped
    assert runs[0].hash == runs[50].hash
    assert 0 < len(runs[0.5].skipped) < 33 and min(runs[0.5].skipped) > 128  # window full first
    assert runs[0.5].hash != runs[0].hash


@covers("-a")
def test_a_overfits_one_batch(fp32: Trainer, work: Workplace) -> None:
    same = fp32.train(work.args({"-a": 1, "-l": 0, "-x": 5, "-d": 64}))
    assert len(set(same.numbers[i][1] for i in range(5))) == 1
    other = fp32.train(work.args({"-a": 0, "-l": 0, "-x": 5, "-d": 64}))
    assert len(set(other.numbers[i][1] for i in range(5))) == 5


@covers("-rs")
def test_rs_seed(fp32: Trainer, work: Workplace) -> None:
    hashes = {seed: fp32.train(work.args({"-rs": seed}, "--hash")).hash for seed in (0, 1, 1337)}
    assert len(set(hashes.values())) == 3
    assert fp32.train(work.args({}, "--hash")).hash == hashes[1337]


# ---------------------------------------------------------------------------------- evaluation


@covers("-v")
@pytest.mark.parametrize("every, count", [(0, 0), (1, 7), (2, 4), (4, 3), (100, 2)])
def test_v_validates_at_the_start_every_v_steps_and_at_the_end(
    fp32: Trainer, work: Workplace, every: int, count: int
) -> None:
    assert len(fp32.train(work.args({"-v": every, "-x": 6})).val_losses()) == count


@covers("-m")
def test_m_validation_batches(fp32: Trainer, work: Workplace) -> None:
    def val(m: int) -> str:
        return fp32.train(work.args({"-v": 5, "-m": m, "-x": 1})).val_losses()[0]

    # 501 tokens: 31 windows, 15 micro-batches of 2.
    assert len({val(1), val(5), val(14), val(15)}) == 4
    assert val(15) == val(16) == val(1000)


@covers("-s", "-g")
def test_s_g_samples(fp32: Trainer, work: Workplace) -> None:
    write_tokenizer(work.folder / "gpt2_tokenizer.bin", SHAPE.vocab_size, eot=0)

    def texts(flags: dict) -> list[str]:
        result = fp32.train(work.args({"-x": 4, **flags}), cwd=work.folder)
        return re.findall(r"^generating:\n---\n(.*?)\n---$", result.stdout, re.M | re.S)

    def lengths(found: list[str]) -> list[int]:
        return [len(re.findall(r"<\d+>", text)) for text in found]

    assert texts({"-s": 0}) == []
    every_two = texts({"-s": 2, "-g": 7})
    assert len(every_two) == 2 and len(set(every_two)) == 2
    assert set(lengths(every_two)) <= {6, 7}, "the first of -g tokens is the start of the text"
    longer = texts({"-s": 2, "-g": 12})
    assert [b - a for a, b in zip(lengths(every_two), lengths(longer))] == [5, 5]
    assert longer[0].startswith(every_two[0].strip())
    assert texts({"-s": 2, "-g": 7}) == every_two


@covers("-s")
def test_s_without_a_tokenizer_shows_numbers(fp32: Trainer, work: Workplace) -> None:
    result = fp32.train(work.args({"-x": 2, "-s": 1, "-g": 5}), cwd=work.folder)
    assert re.search(r"^generating:\n---\n[\d ]+\n---$", result.stdout, re.M), f"{result}"


def hellaswag(work: Workplace, count: int, label: Callable[[int], int]) -> None:
    """Examples whose completion number `label` is what make_tokens' rule says."""
    swag = work.folder / "dev/data/hellaswag/hellaswag_val.bin"
    swag.parent.mkdir(parents=True, exist_ok=True)
    examples = []
    for i in range(count):
        text = [(11 * i) % 256]
        for _ in range(9):
            text.append((5 * text[-1] + 3) % 256)
        right = text[6:]
        wrong = [[(token + 17 * (k + 1)) % 256 for token in right] for k in range(3)]
        completions = wrong[: label(i)] + [right] + wrong[label(i) :]
        examples.append((label(i), text[:6], completions))
    write_eval(swag, examples)


@covers("-h")
def test_h_hellaswag(fp32: Trainer, work: Workplace) -> None:
    hellaswag(work, 5, lambda i: i % 4)

    def scores(flags: dict) -> list[tuple[int, int]]:
        result = fp32.train(work.args({"-b": 4, "-d": 64, "-v": 3, **flags}), cwd=work.folder)
        return [(int(a), int(b))
                for a, b in re.findall(r"HellaSwag: (\d+)/(\d+)", result.stdout)]

    assert scores({"-h": 0}) == []
    found = scores({"-h": 1})
    assert len(found) == 2 and all(right <= 5 and total == 5 for right, total in found)
    # How many examples go into one batch does not matter.
    assert scores({"-h": 1, "-b": 8, "-d": 128, "-l": 0}) == scores(
        {"-h": 1, "-b": 20, "-d": 320, "-l": 0}) == scores({"-h": 1, "-l": 0})


@covers("-h")
def test_h_a_trained_model_answers_right(fp32: Trainer, work: Workplace) -> None:
    hellaswag(work, 8, lambda i: (3 * i + 1) % 4)
    result = fp32.train(work.args({"-h": 1, "-b": 16, "-d": 256, "-x": 150, "-l": 5e-3,
                                   "-v": 150}), cwd=work.folder)
    scores = [int(right) for right in re.findall(r"HellaSwag: (\d+)/8", result.stdout)]
    assert scores[-1] >= 7, f"{result}"


# ------------------------------------------------------------------------------------ numerics


@covers("-f", "-ge", "-cg")
@pytest.mark.parametrize(
    "flag, values", [("-f", (0, 1)), ("-ge", (-1, 0, 1, 2)), ("-cg", (0, 1))]
)
def test_f_ge_cg_speak_of_gpus_alone(
    trainer: Trainer, work: Workplace, flag: str, values: tuple[int, ...]
) -> None:
    """A CPU has no TF32, no fused GELU of cuBLASLt, no CUDA graphs: recorded, and the same bits."""
    hashes = set()
    for value in values:
        out = work.folder / f"out_{value}"
        result = trainer.train(work.args({flag: value, "-o": out}, "--hash"))
        hashes.add(result.hash)
        says_so = any(line.startswith(f"-ge {value}: ") for line in result.stdout.splitlines())
        assert says_so == (flag == "-ge" and value > 0)
        name = {"-f": "tf32", "-ge": "gelu_fusion", "-cg": "cuda_graphs"}[flag]
        assert json.loads((out / "run.json").read_text())["options"][name] == value
    assert len(hashes) == 1


@covers("-w")
def test_w_master_weights(fp32: Trainer, bf16: Trainer, work: Workplace) -> None:
    def run(trainer: Trainer, value: int) -> tuple[str, int]:
        out = work.folder / f"{trainer.precision}_{value}"
        result = trainer.train(work.args({"-w": value, "-x": 6, "-o": out, "-n": 6}, "--hash"))
        return result.hash, state_path(out, 6).stat().st_size

    parameters = sum(math.prod(dims) for dims in SHAPE.tensors().values())
    (with_hash, with_size), (without_hash, without_size) = run(bf16, 1), run(bf16, 0)
    assert with_size - without_size == 4 * parameters
    assert with_hash != without_hash
    assert run(fp32, 1)[0] == run(fp32, 0)[0], "fp32 weights are their own master"


@covers("-r")
def test_r_recompute_saves_memory(fp32: Trainer, work: Workplace) -> None:
    """--dry-run prints the plan: less memory at each level. (Same bits: test_reproducibility.)"""
    def activations(level: int) -> float:
        flags = {"-e": "custom:L4C128H2T64V256", "-t": 64, "-b": 8, "-d": 512, "-r": level}
        text = fp32.train(work.args(flags, "--dry-run")).stdout
        rows = re.findall(r"^\| activations .*\| +([\d.]+) \|$", text, re.M)
        return sum(map(float, rows))

    nothing, gelu, both = (activations(level) for level in (0, 1, 2))
    assert nothing > gelu > both


# -------------------------------------------------------------------------------- several GPUs


@covers("-z")
def test_z_zero_stage(trainer: Trainer, work: Workplace) -> None:
    """In one process all stages are one; 2 and 3 say that they fall back."""
    runs = {z: trainer.train(work.args({"-z": z}, "--hash")) for z in range(4)}
    assert len({run.hash for run in runs.values()}) == 1
    for z in (2, 3):
        text = runs[z].stdout + runs[z].stderr
        assert re.search(rf"\b{z}\b.*\b0\b", text) and "ZeRO" in text, f"{runs[z]}"


@covers("-rw")
def test_rw_reduction_width(trainer: Trainer, work: Workplace) -> None:
    hashes = {
        width: trainer.train(work.args({"-rw": width, "-d": 512, "-x": 2}, "--hash")).hash
        for width in (1, 2, 4, 7, 8, 15, 16, 1000)
    }
    assert hashes[7] == hashes[4] and hashes[15] == hashes[8], "cut to a power of two"
    assert hashes[1000] == hashes[16], "M is 16"
    assert len({hashes[w] for w in (1, 2, 4, 8, 16)}) == 5, "each width is another order of sums"


@covers("-pn", "-pr", "-pg", "-pi")
def test_pn_pr_pg_pi_of_a_lone_process(fp32: Trainer, work: Workplace) -> None:
    plain = fp32.train(work.args({}, "--hash"))
    for method in ("mpi", "fs", "tcp"):
        flags = {"-pn": 1, "-pr": 0, "-pg": 1, "-pi": method}
        assert fp32.train(work.args(flags, "--hash")).hashes == plain.hashes


@covers("-ps", "-pp", "-pf")
@pytest.mark.parametrize(
    "flags, needle",
    [({"-pi": "tcp"}, "-ps"), ({"-pi": "fs"}, "-pf"), ({"-pi": "tcp", "-pp": 0}, "-pp"),
     ({"-pi": "tcp", "-ps": "localhost", "-pp": 65536}, "-pp")],
)
def test_ps_pp_pf_are_needed_by_their_methods(
    fp32: Trainer, work: Workplace, flags: dict, needle: str
) -> None:
    assert_refused(fp32.run(work.args({"-pn": 2, "-pr": 0, **flags})), needle)


# --------------------------------------------------------------------------------------- other


@covers("--help")
@pytest.mark.parametrize("more", [[], ["-b", "3"]])
def test_help(fp32: Trainer, more: list[str]) -> None:
    result = fp32.train(["--help", *more])
    assert "Examples" in result.stdout
    shown = result.stdout.replace(str(fp32.binary), "./train_gpt2cpu")
    assert max(map(len, shown.splitlines())) <= 100


@covers("--version")
def test_version(trainer: Trainer) -> None:
    (line,) = trainer.train(["--version"]).stdout.splitlines()
    assert trainer.precision.upper() in line and "commit" in line


@covers("--check-ranks")
def test_check_ranks_says_the_weights_hash_of_every_step(work: Workplace, fp32: Trainer) -> None:
    """With several ranks: test_many_ranks.py."""
    result = fp32.train(work.args({"-x": 2}, "--check-ranks", "--hash"))
    lines = [line for line in result.stdout.splitlines() if line.startswith("weights of step")]
    assert [line.split(":")[0] for line in lines] == [f"weights of step {n}" for n in range(3)]
    assert result.hash in lines[-1], f"{result}"


@covers("--dry-run")
def test_dry_run(fp32: Trainer, work: Workplace) -> None:
    """Checks everything, prints the plan, trains and writes nothing."""
    before = snapshot(work.folder)
    result = fp32.train(work.args({"-o": work.out, "-n": 1, "-d": 128}, "--dry-run"))
    assert not result.steps
    assert snapshot(work.folder) == before
    assert_refused(fp32.run(work.args({"-d": 33}, "--dry-run")), "-d", "33")
    broken = write_tokens(work.folder / "broken.bin", make_tokens(400, 256), magic=7)
    assert_refused(fp32.run(work.args({"-i": broken}, "--dry-run")), "broken.bin")
    model = work.folder / "short_model.bin"
    write_model(model, SHAPE, random_weights(SHAPE))
    model.write_bytes(model.read_bytes()[:-1])
    assert_refused(fp32.run(work.args({"-e": model}, "--dry-run")), "short_model.bin")


@covers("--hash")
def test_hash(trainer: Trainer, work: Workplace) -> None:
    result = trainer.train(work.args({"-x": 4}, "--hash"))
    assert len(result.hashes) == 1, "--help says at the end"
    assert result.hash != trainer.train(work.args({"-x": 3}, "--hash")).hash
    assert not trainer.train(work.args({"-x": 4})).hashes
    # One changed bit of one weight changes it.
    weights = random_weights(SHAPE)
    hashes = []
    for delta in (0.0, 2**-7):  # one unit in bf16's last place
        weights["fcprojb"][1, 31] = 1.0 + delta
        model = write_model(work.folder / "model.bin", SHAPE, weights)
        hashes.append(trainer.train(work.args({"-e": model, "-x": 0}, "--hash")).hash)
    assert hashes[0] != hashes[1]


def test_no_flag_is_forgotten(fp32: Trainer) -> None:
    text = fp32.train(["--help"]).stdout
    listed = set(re.findall(r"^  (-{1,2}[a-z][a-z-]*)", text, re.M))
    assert len(listed) > 30
    assert listed == COVERED


@pytest.mark.parametrize("twice", [("-b", "2", "-b", "4"), ("--hash", "--hash")])
def test_a_flag_given_twice(fp32: Trainer, twice: tuple[str, ...]) -> None:
    assert_refused(fp32.run(list(twice)), twice[0], "twice")


def test_nearest_flag_is_named(fp32: Trainer) -> None:
    assert_refused(fp32.run(["--zero-stage", "1"]), "--zero-stage", "-z")
    assert_refused(fp32.run(["--batch-size", "4"]), "--batch-size", "-b")
