"""Bad input ends in one clear line, status 1 and nothing written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Mapping

import numpy as np
import pytest

from helpers import (
    MODEL,
    MODEL_BF16,
    SHAPE,
    Trainer,
    Workplace,
    assert_refused,
    header,
    make_tokens,
    model_header,
    random_weights,
    snapshot,
    state_path,
    wait_for_a_step,
    write_eval,
    write_model,
    write_tokens,
)


def refuse(trainer: Trainer, work: Workplace, args: list[object], *needles: str, **how) -> None:
    """Runs and asserts a refusal that leaves every file as it was and makes none."""
    before = snapshot(work.folder)
    result = trainer.run(args, timeout=20, cwd=work.folder, **how)
    assert_refused(result, *needles)
    assert not result.steps, f"trained before it refused\n{result}"
    assert snapshot(work.folder) == before, f"files changed\n{result}"


def build_of(trainer: Trainer, work: Workplace) -> dict:
    """How the trainer was built, from its run.json."""
    place = work.folder / "build"
    trainer.train(work.args({"-x": 0, "-o": place}))
    return json.loads((place / "run.json").read_text())["build"]


@dataclass(frozen=True)
class Case:
    """Flags to change in a good command, more words at its end, and what the line must hold."""

    name: str
    needles: tuple[str, ...]
    flags: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def value(flag: str, text: object, *needles: str) -> Case:
    """A flag with a value that it cannot take; the line names both."""
    return Case(f"{flag}={text!s:.24}", (flag, str(text), *needles), {flag: text})


NOT_WHOLE = ("x", "2.5", "2x", "1e3", "0x10", "99999999999999999999", "", " ")
COMMAND_LINE = [
    Case("unknown flag", ("-q7",), words=("-q7", "1")),
    Case("unknown long flag", ("--zero-stage",), words=("--zero-stage", "1")),
    Case("flag without a value", ("-c",), words=("-c",)),
    Case("word without a flag", ("second_file.bin",), words=("second_file.bin",)),
    Case("empty word", ("''",), words=("",)),
    *[value("-b", text) for text in NOT_WHOLE],
    *[value(flag, "seven") for flag in (
        "-t", "-d", "-x", "-u", "-v", "-m", "-s", "-g", "-h", "-a", "-f", "-w", "-ge", "-r", "-cg",
        "-z", "-y", "-n", "-nk", "-nm", "-lg", "-rw", "-rs", "-pn", "-pr", "-pg")],
    *[value(flag, text) for flag in ("-l", "-q", "-c", "-sl", "-sg")
      for text in ("fast", "1e", "0.1.2", "nan", "inf", "1e999", "")],
    value("-b", 0),
    value("-b", -2),
    value("-t", 0),
    value("-t", -16),
    value("-d", 0),
    value("-l", -1),
    value("-c", -0.5),
    value("-q", 1.5),
    value("-q", -0.1),
    value("-u", -1),
    value("-r", 3),
    value("-r", -1),
    value("-z", -1),
    value("-w", 2),
    value("-a", 2),
    value("-y", 2),
    value("-rw", 0),
    value("-rw", -8),
    value("-g", 0),
    value("-k", "sawtooth", "cosine", "constant", "linear", "wsd"),
    value("-pi", "pigeon", "mpi", "tcp", "fs"),
    value("-pn", 0),
    value("-pg", 0),
    Case("rank outside", ("-pr", "5"), {"-pr": 5, "-pn": 2, "-pi": "fs", "-pf": "."}),
    Case("negative rank", ("-pr", "-1"), {"-pr": -1, "-pn": 2, "-pi": "fs", "-pf": "."}),
]


@pytest.mark.parametrize("case", COMMAND_LINE, ids=lambda case: case.name)
def test_command_line(fp32: Trainer, work: Workplace, case: Case) -> None:
    refuse(fp32, work, work.args({"-o": work.out, **case.flags}, *case.words), *case.needles)


# -------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "batch, seq_len, total, nearest",
    [(2, 16, 33, ("32", "64")), (2, 16, 100, ("96", "128")), (4, 32, 100, ("128",)),
     (2, 16, 16, ("32",))],
)
def test_total_batch_not_divisible(
    fp32: Trainer, work: Workplace, batch: int, seq_len: int, total: int, nearest: tuple[str, ...]
) -> None:
    args = work.args({"-b": batch, "-t": seq_len, "-d": total, "-o": work.out})
    refuse(fp32, work, args, "-d", str(total), *nearest)


def test_nanochat_533_total_batch_of_half_a_million(fp32: Trainer, work: Workplace) -> None:
    shape = "custom:L1C32H2T1024V256"
    args = work.args({"-e": shape, "-b": 4, "-t": 1024, "-d": 500000, "-o": work.out})
    refuse(fp32, work, args, "-d", "500000", "499712", "503808")


@pytest.mark.parametrize("total", [2**40, 2**40 - 32, 2**36])
def test_a_step_of_more_micro_batches_than_can_be(
    fp32: Trainer, work: Workplace, total: int
) -> None:
    """The number of micro-batches does not wrap around; no other flag is blamed."""
    refuse(fp32, work, work.args({"-d": total, "-o": work.out}), "-d", str(total))


@pytest.mark.parametrize("model", ["custom:L1024C65536H1T32V256", "gpt3:c12288"])
def test_a_model_that_does_not_fit_into_memory(fp32: Trainer, work: Workplace, model: str) -> None:
    refuse(fp32, work, work.args({"-e": model, "-o": work.out}), "MiB")


def test_a_run_that_does_not_fit_names_what_would(fp32: Trainer, work: Workplace) -> None:
    """Said before anything is allocated or written, with a -b that then does fit."""
    args = {"-e": "custom:L2C64H2T256V50257", "-b": 64, "-t": 256, "-d": 64 * 256, "-o": work.out}
    write_tokens(work.folder / "long.bin", make_tokens(20000, 50257))
    args["-i"] = work.folder / "long.bin"
    limited = ["prlimit", f"--as={1500 << 20}"]
    result = fp32.run(work.args(args), prefix=limited)
    assert_refused(result, "-b 64", "-t 256", "MiB", "would fit")
    assert not work.out.exists()
    batch, level = re.search(r"-b (\d+) -r (\d) would fit", result.stderr).groups()
    args |= {"-b": int(batch), "-r": int(level), "-x": 1, "-d": int(batch) * 256}
    assert fp32.run(work.args(args), prefix=limited).status == 0


def test_sequence_longer_than_the_models(fp32: Trainer, work: Workplace) -> None:
    refuse(fp32, work, work.args({"-t": 33, "-d": 66, "-o": work.out}), "-t", "33", "32")


def test_llmc_727_fewer_windows_than_a_batch(fp32: Trainer, work: Workplace) -> None:
    tokens = make_tokens(32768, SHAPE.vocab_size)
    small = write_tokens(work.folder / "small.bin", tokens)
    args = work.args({"-e": "custom:L1C32H2T1024V256", "-b": 64, "-t": 1024, "-d": 65536,
                      "-i": small, "-o": work.out})
    refuse(fp32, work, args, "-b", "64", "31", "small.bin")


def test_llmc_727_fewer_validation_windows_than_a_batch(fp32: Trainer, work: Workplace) -> None:
    tokens = make_tokens(32768, SHAPE.vocab_size)
    small = write_tokens(work.folder / "small.bin", tokens)
    many = write_tokens(work.folder / "many.bin", np.resize(tokens, 70 * 1024))
    args = work.args({"-e": "custom:L1C32H2T1024V256", "-b": 64, "-t": 1024, "-d": 65536,
                      "-i": many, "-j": small, "-v": 1, "-o": work.out})
    refuse(fp32, work, args, "-b", "64", "31", "small.bin")


def test_windows_do_not_reach_over_file_ends(fp32: Trainer, work: Workplace) -> None:
    # 2 files of 2 windows and 15 tokens each: 4 windows, though their tokens would fill 5.
    for name in ("part_a.bin", "part_b.bin"):
        write_tokens(work.folder / name, make_tokens(2 * 16 + 1 + 15, SHAPE.vocab_size))
    pattern = work.folder / "part_*.bin"
    refuse(fp32, work, work.args({"-i": pattern, "-b": 5, "-d": 80}), "-b", "5", "4")
    fp32.train(work.args({"-i": pattern, "-b": 4, "-d": 64}))


def test_only_files_shorter_than_a_window(fp32: Trainer, work: Workplace) -> None:
    short = write_tokens(work.folder / "short.bin", make_tokens(16, SHAPE.vocab_size))
    refuse(fp32, work, work.args({"-i": short, "-o": work.out}), "short.bin")


def test_a_short_file_among_others_is_a_warning(fp32: Trainer, work: Workplace) -> None:
    short = write_tokens(work.folder / "train_short.bin", make_tokens(16, SHAPE.vocab_size))
    alone = fp32.train(work.args({}, "--hash"))
    result = fp32.train(work.args({"-i": work.folder / "train*.bin"}, "--hash"))
    assert [line for line in result.warnings if short.name in line], f"no warning\n{result}"
    assert len(result.steps) == 3
    assert result.hash == alone.hash, "the short file changed what was trained"


# ----------------------------------------------------------------------------- token files


def token_file_cases() -> list:
    good = make_tokens(400, SHAPE.vocab_size)

    def outlier(path: Path) -> None:
        tokens = good.copy()
        tokens[123] = 256
        write_tokens(path, tokens)

    def raw(path: Path, data: bytes) -> None:
        path.write_bytes(data)

    cases: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
        ("wrong magic", lambda p: write_tokens(p, good, magic=20240521), ("20240521", "20240520")),
        ("a model file", lambda p: write_model(p, SHAPE, random_weights(SHAPE)), ("20240326",)),
        ("wrong version", lambda p: write_tokens(p, good, version=7), ("version 7", "1")),
        ("token outside the vocabulary", outlier, ("256",)),
        ("count above the file's size", lambda p: write_tokens(p, good, count=5000), ("5000",)),
        ("negative count", lambda p: write_tokens(p, good, count=-400), ("-400",)),
        ("no tokens", lambda p: write_tokens(p, []), ()),
        ("tokens of four bytes", lambda p: raw(p, header(20240520, 1, 400) +
                                               good.astype("<u4").tobytes()), ("400",)),
        ("odd size", lambda p: raw(p, header(20240520, 1, 400) + bytes(799)), ("400",)),
        ("empty file", lambda p: raw(p, b""), ("empty",)),
        ("half a header", lambda p: raw(p, header(20240520, 1, 400)[:500]), ("500",)),
        ("text", lambda p: raw(p, b"To be, or not to be" * 100), ()),
        ("a folder", lambda p: p.mkdir(), ()),
        ("a pipe", lambda p: os.mkfifo(p), ()),
    ]
    return [pytest.param(make, needles, id=name) for name, make, needles in cases]


@pytest.mark.parametrize("flag", ["-i", "-j"])
@pytest.mark.parametrize("make, needles", token_file_cases())
def test_token_file(
    fp32: Trainer, work: Workplace, flag: str, make: Callable, needles: tuple[str, ...]
) -> None:
    bad = work.folder / "broken.bin"
    make(bad)
    args = work.args({flag: bad, "-v": 1, "-o": work.out})
    if not bad.is_file():  # a snapshot cannot read a pipe
        result = fp32.run(args, timeout=20)
        assert_refused(result, "broken.bin", *needles)
        assert not work.out.exists()
        return
    refuse(fp32, work, args, "broken.bin", *needles)


@pytest.mark.parametrize("flag", ["-i", "-j"])
def test_one_broken_token_file_among_good_ones(fp32: Trainer, work: Workplace, flag: str) -> None:
    write_tokens(work.folder / "part_1.bin", make_tokens(400, SHAPE.vocab_size))
    write_tokens(work.folder / "part_2.bin", make_tokens(400, SHAPE.vocab_size), magic=1)
    args = work.args({flag: work.folder / "part_*.bin", "-v": 1, "-o": work.out})
    refuse(fp32, work, args, "part_2.bin")


def test_a_high_token_at_the_very_end(fp32: Trainer, work: Workplace) -> None:
    tokens = make_tokens(2001, SHAPE.vocab_size)
    tokens[2000] = 60000
    bad = write_tokens(work.folder / "broken.bin", tokens)
    refuse(fp32, work, work.args({"-i": bad, "-o": work.out}), "broken.bin", "60000")


@pytest.mark.parametrize("flag", ["-i", "-j", "-e"])
def test_missing_file(fp32: Trainer, work: Workplace, flag: str) -> None:
    missing = work.folder / "no_such_file.bin"
    refuse(fp32, work, work.args({flag: missing, "-v": 1, "-o": work.out}), str(missing))


@pytest.mark.parametrize("flag", ["-i", "-j", "-e"])
def test_a_folder_was_not_a_regular_file_of_no_flag(
    fp32: Trainer, work: Workplace, flag: str
) -> None:
    (work.folder / "data").mkdir()
    refuse(fp32, work, work.args({flag: work.folder / "data", "-v": 1}), flag, "data", "a folder")


@pytest.mark.parametrize("flag", ["-i", "-j"])
def test_pattern_that_matches_nothing(fp32: Trainer, work: Workplace, flag: str) -> None:
    pattern = work.folder / "shard_*.bin"
    refuse(fp32, work, work.args({flag: pattern, "-v": 1, "-o": work.out}), flag, "shard_*.bin")


def test_pattern_expanded_by_the_shell(fp32: Trainer, work: Workplace) -> None:
    """-i part_*.bin without quotes gives two names, the second of which belongs to no flag."""
    args = ["-i", work.folder / "part_1.bin", work.folder / "part_2.bin", "-e", MODEL]
    refuse(fp32, work, args, "part_2.bin")


# ----------------------------------------------------------------------------- model files


def model_file_cases() -> list:
    weights = random_weights(SHAPE)
    body = b"".join(tensor.tobytes() for tensor in weights.values())

    def ints(**changes: int) -> bytes:
        places = {"magic": 0, "version": 1, "max_seq_len": 2, "vocab_size": 3, "layers": 4,
                  "heads": 5, "channels": 6, "padded": 7}
        values = np.frombuffer(model_header(SHAPE), dtype="<i4").copy()
        for name, number in changes.items():
            values[places[name]] = number
        return values.tobytes()

    cases = [
        ("wrong magic", ints(magic=20240327) + body, ("20240327", "20240326")),
        ("wrong version", ints(version=4) + body, ("version 4", "3", "5")),
        ("fp32 said to be bf16", ints(version=MODEL_BF16) + body, ()),
        ("truncated", (ints() + body)[:-4], ()),
        ("half of it", (ints() + body)[: (1024 + len(body)) // 2], ()),
        ("header only", ints(), ()),
        ("four bytes too long", ints() + body + bytes(4), ()),
        ("empty file", b"", ("empty",)),
        ("half a header", ints()[:100], ("100",)),
        ("more layers than weights", ints(layers=3) + body, ()),
        ("no layers", ints(layers=0) + body, ("0",)),
        ("negative layers", ints(layers=-2) + body, ("-2",)),
        ("no heads", ints(heads=0) + body, ("0",)),
        ("heads that do not divide", ints(heads=3) + body, ("3", "32")),
        ("no channels", ints(channels=0) + body, ("0",)),
        ("huge channels", ints(channels=2**31 - 1) + body, (str(2**31 - 1),)),
        ("vocabulary above its padding", ints(vocab_size=300) + body, ("300",)),
        ("negative vocabulary", ints(vocab_size=-1) + body, ("-1",)),
        ("no positions", ints(max_seq_len=0) + body, ("0",)),
    ]
    return [pytest.param(data, needles, id=name) for name, data, needles in cases]


@pytest.mark.parametrize("data, needles", model_file_cases())
def test_model_file(
    fp32: Trainer, work: Workplace, data: bytes, needles: tuple[str, ...]
) -> None:
    bad = work.folder / "broken.bin"
    bad.write_bytes(data)
    refuse(fp32, work, work.args({"-e": bad, "-o": work.out}), "broken.bin", *needles)


def test_a_model_file_that_is_not_there(fp32: Trainer, work: Workplace) -> None:
    args = work.args({"-e": work.folder / "none.bin", "-o": work.out})
    refuse(fp32, work, args, "-e", "none.bin", "expected a model file, or a model such as d12")


@pytest.mark.parametrize(
    "name", ["d13", "d", "d0", "d-12", "gpt3:c7", "gpt3:", "custom:", "custom:L2", "medium",
             "custom:L2C32H3T32V256", "custom:L0C32H2T32V256", "custom:L2C32H2T32V256x"]
)
def test_model_name(fp32: Trainer, work: Workplace, name: str) -> None:
    refuse(fp32, work, work.args({"-e": name, "-o": work.out}), "-e", name)


# ------------------------------------------------------------------------------ other files


def test_hellaswag_needs_four_rows(fp32: Trainer, work: Workplace) -> None:
    swag = work.folder / "dev/data/hellaswag/hellaswag_val.bin"
    swag.parent.mkdir(parents=True)
    write_eval(swag, [(1, [5, 6, 7], [[1], [2], [3], [4]])])
    refuse(fp32, work, work.args({"-h": 1, "-b": 2, "-v": 1, "-o": work.out}), "-b", "2", "4")


def test_hellaswag_file_missing(fp32: Trainer, work: Workplace) -> None:
    args = work.args({"-h": 1, "-b": 4, "-d": 64, "-v": 1, "-o": work.out})
    refuse(fp32, work, args, "hellaswag_val.bin")


def hellaswag_cases() -> list:
    good = [(1, [5, 6, 7], [[1], [2], [3], [4]])]
    cases = [
        ("wrong magic", lambda data: header(20240520) + data[1024:], ("20240520",)),
        ("truncated", lambda data: data[:-2], ()),
        ("more examples than there are", lambda data: header(20240522, 1, 9, 99) + data[1024:], ()),
        ("no start mark", lambda data: data[:1024] + bytes(2) + data[1026:], ()),
    ]
    return [pytest.param(good, spoil, needles, id=name) for name, spoil, needles in cases]


@pytest.mark.parametrize("examples, spoil, needles", hellaswag_cases())
def test_hellaswag_file(
    fp32: Trainer, work: Workplace, examples: list, spoil: Callable, needles: tuple[str, ...]
) -> None:
    swag = work.folder / "dev/data/hellaswag/hellaswag_val.bin"
    swag.parent.mkdir(parents=True)
    write_eval(swag, examples)
    swag.write_bytes(spoil(swag.read_bytes()))
    args = work.args({"-h": 1, "-b": 4, "-d": 64, "-v": 1, "-o": work.out})
    refuse(fp32, work, args, "hellaswag_val.bin", *needles)


# ------------------------------------------------------------------------------------ output


def test_output_is_a_file(fp32: Trainer, work: Workplace) -> None:
    work.out.write_text("not a folder")
    refuse(fp32, work, work.args({"-o": work.out}), "-o", str(work.out))


def test_output_below_a_file(fp32: Trainer, work: Workplace) -> None:
    work.out.write_text("not a folder")
    refuse(fp32, work, work.args({"-o": work.out / "run"}), "-o", str(work.out / "run"))


def test_output_without_permission_to_write(fp32: Trainer, work: Workplace) -> None:
    work.out.mkdir(mode=0o555)
    # Root may write everywhere until it gives up that capability.
    capabilities = "-dac_override,-dac_read_search"
    as_others = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    prefix = as_others if os.geteuid() == 0 else ()
    refuse(fp32, work, work.args({"-o": work.out}), "-o", str(work.out), prefix=prefix)
    refuse(fp32, work, work.args({"-o": work.out / "run"}), "-o", str(work.out), prefix=prefix)


def test_output_folder_whose_parent_is_missing(fp32: Trainer, work: Workplace) -> None:
    refuse(fp32, work, work.args({"-o": work.out / "a" / "run"}), f"{work.out}/a is not there")


# -------------------------------------------------------------------------------- checkpoints


def test_checkpoint_of_another_model(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out, "-n": 3}))
    args = work.args({"-e": "custom:L1C32H2T32V256", "-o": work.out, "-n": 3, "-y": 1, "-x": 6})
    refuse(fp32, work, args, "-e")


def test_resume_without_a_checkpoint_starts_anew_and_says_so(
    fp32: Trainer, work: Workplace
) -> None:
    fresh = fp32.train(work.args({}, "--hash"))
    result = fp32.train(work.args({"-o": work.out, "-y": 1}, "--hash"))
    said = [line for line in (result.stdout + result.stderr).splitlines()
            if f"no checkpoint in {work.out}" in line]
    assert said, f"nothing said about the missing checkpoint\n{result}"
    assert result.hash == fresh.hash


def test_resume_without_an_output_folder(fp32: Trainer, work: Workplace) -> None:
    refuse(fp32, work, work.args({"-y": 1}), "-y", "-o")


# ---------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("ranks", [2, 8])
def test_llmc_426_ranks_without_mpirun(fp32: Trainer, work: Workplace, ranks: int) -> None:
    """-pi mpi with -pn 2 but no mpirun: never a lone run in the folder of two."""
    args = work.args({"-pi": "mpi", "-pn": ranks, "-pr": 0, "-o": work.out})
    refuse(fp32, work, args, f"-pn {ranks}")


def test_llmc_632_ranks_that_cannot_find_each_other(fp32: Trainer, work: Workplace) -> None:
    """mpirun of a build without MPI; several ranks of a build with MPI, but without mpirun."""
    if build_of(fp32, work)["mpi"]:
        refuse(fp32, work, work.args({"-pn": 2, "-o": work.out}), "-pn 2", "mpirun")
        return
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    refuse(fp32, work, work.args({"-o": work.out}), "-pi mpi", "2", "mpirun", env=env)


@pytest.mark.parametrize("method", ["mpi", "tcp", "fs"])
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_of_several_gets_no_lone_runs(
    fp32: Trainer, work: Workplace, method: str, name: str
) -> None:
    if build_of(fp32, work)["multi_gpu"]:
        return
    args = work.args({"-pi": method, "-o": work.out})
    refuse(fp32, work, args, f"-pi {method}", name, env={name: "4"})


def test_hellaswag_without_validation(fp32: Trainer, work: Workplace) -> None:
    refuse(fp32, work, work.args({"-h": 1, "-v": 0, "-b": 4, "-d": 64}), "-h 1", "-v 0")


@pytest.mark.parametrize("flags", [["--help"], ["--version"], ["--dry-run"], []])
def test_full_stdout_is_an_error(fp32: Trainer, work: Workplace, flags: list[str]) -> None:
    args = [str(a) for a in work.args({}, *flags)]
    with open("/dev/full", "w") as full:
        done = subprocess.run([fp32.binary, *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "standard output" in done.stderr


def test_closed_standard_streams_do_not_end_in_the_log(fp32: Trainer, work: Workplace) -> None:
    args = " ".join(str(a) for a in work.args({"-o": work.out, "-s": 0}))
    done = subprocess.run(["sh", "-c", f"exec {fp32.binary} {args} <&- >&- 2>&-"])
    assert done.returncode == 0
    lines = (work.out / "main.log").read_text().splitlines()
    assert len(lines) == 3 and all(line.startswith("s:") for line in lines)


def test_fs_without_a_folder(fp32: Trainer, work: Workplace) -> None:
    args = work.args({"-pi": "fs", "-pn": 2, "-pr": 0, "-o": work.out})
    refuse(fp32, work, args, "-pf")


def test_fs_in_a_folder_that_is_not_there(fp32: Trainer, work: Workplace) -> None:
    missing = work.folder / "nowhere"
    args = work.args({"-pi": "fs", "-pn": 2, "-pr": 1, "-pf": missing, "-o": work.out})
    several = build_of(fp32, work)["multi_gpu"]
    refuse(fp32, work, args, *(("-pf", str(missing)) if several else ("-pn 2",)))


def test_tcp_without_a_server(fp32: Trainer, work: Workplace) -> None:
    args = work.args({"-pi": "tcp", "-pn": 2, "-pr": 1, "-o": work.out})
    refuse(fp32, work, args, "-ps")


# ------------------------------------------------------------------------------ what is left


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_builds_refuse_alike(
    request: pytest.FixtureRequest, work: Workplace, precision: str
) -> None:
    trainer = request.getfixturevalue(precision)
    refuse(trainer, work, work.args({"-b": 0, "-o": work.out}), "-b", "0")


def test_output_folder_is_not_made_for_a_refused_run(fp32: Trainer, work: Workplace) -> None:
    refuse(fp32, work, work.args({"-d": 33, "-o": work.out}), "-d")
    assert not work.out.exists()


def test_old_checkpoints_survive_a_refused_run(fp32: Trainer, work: Workplace) -> None:
    fp32.train(work.args({"-o": work.out, "-n": 3}))
    assert state_path(work.out, 3).exists()
    refuse(fp32, work, work.args({"-d": 33, "-o": work.out, "-n": 3}), "-d")


def test_a_reader_that_goes_away_does_not_end_the_training(
    fp32: Trainer, work: Workplace
) -> None:
    """A `tee` that died took the run with it, and what it had trained since its last checkpoint."""
    process = fp32.start(work.args({"-x": 2000, "-o": work.out, "-n": 2000}))
    wait_for_a_step(process, work.out)
    process.stdout.close()
    try:
        process.wait(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and "standard output" in process.stderr.read()
    process.stderr.close()
    assert state_path(work.out, 2000).exists()


def test_broken_pipe_is_no_crash(fp32: Trainer, work: Workplace) -> None:
    """trainer | head: the reader goes away."""
    process = fp32.start(work.args({"-x": 200}))
    process.stdout.close()
    try:
        process.wait(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (0, 1, -signal.SIGPIPE)
    assert "terminate" not in process.stderr.read()
    process.stderr.close()
