"""Scripts and what they are given: --help prints help, needs no package and writes nothing; a bad
argument or variable is one clear line, before anything is done.

Python without its packages is `python -S -E`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPO_ROOT, snapshot

Done = subprocess.CompletedProcess


def run_python(script: str, *words: object, cwd: Path, packages: bool = True) -> Done:
    """Runs a script of dev/ in a folder."""
    command = [sys.executable, *([] if packages else ["-S", "-E"]), REPO_ROOT / "dev" / script]
    return subprocess.run([*map(str, command), *map(str, words)], capture_output=True, text=True,
                          cwd=cwd, timeout=60)


def assert_usage_error(done: Done, *parts: str) -> None:
    """argparse's usage, and a last line that has all the parts."""
    assert done.returncode == 2 and done.stderr.startswith("usage: "), done
    line = done.stderr.splitlines()[-1]
    assert all(part in line for part in parts), done


def assert_one_line(done: Done, *parts: str) -> None:
    """Status 1 and one line on stderr that has all the parts."""
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("error: "), done
    assert all(part in done.stderr for part in parts), done


@pytest.mark.parametrize("script", [
    "bench/bench.py", "bench/bench_cpu.py", "bench/compare_torch.py", "bench/profile_step.py",
    "bench/random_tokens.py", "bench/scaling.py", "bench/torch_gpt2.py", "data/fineweb.py",
    "data/hellaswag.py", "data/tinyshakespeare.py", "data/tinystories.py", "check.py",
    "plot_log.py", "run_tests.py",
])
def test_help_needed_packages(script: str, tmp_path: Path) -> None:
    done = run_python(script, "--help", cwd=tmp_path, packages=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: "), done
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- dev/bench


def test_random_tokens_took_help_for_a_file_name(tmp_path: Path) -> None:
    done = run_python("bench/random_tokens.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "FILE [COUNT]" in done.stdout, done
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words, part", [
    ([], "FILE"),
    (["--nonsense"], "FILE"),
    (["x.bin", "5", "6"], "6"),
    (["x.bin", "many"], "COUNT: 'many': expected a whole number from 1 to 2147483647"),
    (["x.bin", "0"], "'0'"),
    (["x.bin", "-5"], "'-5'"),
    (["x.bin", "2147483648"], "'2147483648'"),
], ids=str)
def test_random_tokens_did_not_check_its_arguments(
    words: list[str], part: str, tmp_path: Path
) -> None:
    assert_usage_error(run_python("bench/random_tokens.py", *words, cwd=tmp_path), part)
    assert not list(tmp_path.iterdir())


def test_random_tokens_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "x.bin"):
        assert_one_line(run_python("bench/random_tokens.py", place, 5, cwd=tmp_path), str(place))


def test_random_tokens_without_numpy_is_one_line(tmp_path: Path) -> None:
    done = run_python("bench/random_tokens.py", "x.bin", cwd=tmp_path, packages=False)
    assert_one_line(done, "'numpy' is missing")
    assert not list(tmp_path.iterdir())


def test_torch_gpt2_without_torch_was_a_stack_trace(tmp_path: Path) -> None:
    done = run_python("bench/torch_gpt2.py", cwd=tmp_path, packages=False)
    assert_one_line(done, "is missing", "pip install numpy torch")


@pytest.mark.parametrize("script, words, parts", [
    ("torch_gpt2", ["--batch", "0"], ["--batch", "'0'"]),
    ("torch_gpt2", ["--warmup", "-1"], ["--warmup", "'-1'"]),
    ("torch_gpt2", ["--data", "none.bin"], ["--data none.bin", "no such file"]),
    ("torch_gpt2", ["--weights", "."], ["--weights .", "no such file"]),
    ("torch_gpt2", ["--json", "none/x.json"], ["--json none/x.json", "folder"]),
    ("bench", ["--micro-batches", "0"], ["--micro-batches", "'0'"]),
    ("bench", ["--cpu", "--trainer", "./none"], ["--trainer ./none", "no such program"]),
    ("bench_cpu", ["--rounds", "0"], ["--rounds", "'0'"]),
    ("bench_cpu", ["--steps", "0"], ["--steps", "'0'"]),
    ("bench_cpu", ["--margin", "nan"], ["--margin nan", "below 1"]),
    ("bench_cpu", ["--build-dir", "none"], ["--build-dir", "none/cpu-fp32/train_gpt2cpu"]),
    ("compare_torch", ["--steps", "0", "--warmup", "-1"], ["--steps", "'0'"]),
    ("scaling", ["--turns", "x"], ["--turns", "'x'"]),
    ("profile_step", ["--ranks", "0"], ["--ranks", "'0'"]),
    ("profile_step", ["--warmup", "3"], ["--warmup", "at least 4"]),
    ("profile_step", ["--copy", "0"], ["--copy 0", "more than 0"]),
    ("profile_step", ["--flops", "nan"], ["--flops nan", "more than 0"]),
    ("profile_step", ["--trainer", "."], ["--trainer .", "not found"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else value)
def test_a_bad_argument_of_a_benchmark_was_a_stack_trace(
    script: str, words: list[str], parts: list[str], tmp_path: Path
) -> None:
    done = run_python(f"bench/{script}.py", *words, cwd=tmp_path, packages=False)
    assert_usage_error(done, *parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["bench.py", "bench_cpu.py", "compare_torch.py", "scaling.py"])
def test_out_that_is_no_folder_was_said_after_the_measurement(script: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/results"):
        words = ["--trainer", "true"] if script != "bench_cpu.py" else []
        done = run_python(f"bench/{script}", *words, "--out", out, cwd=tmp_path, packages=False)
        assert_usage_error(done, f"--out {out}")


@pytest.mark.parametrize("option", ["--json", "--keep"])
def test_a_file_of_the_profile_was_tried_after_the_run(option: str, tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    trainer.touch()
    trainer.chmod(0o755)
    words = ["--trainer", trainer, "--library", trainer]
    for file in (tmp_path, trainer / "x"):
        done = run_python("bench/profile_step.py", *words, option, file, cwd=tmp_path,
                          packages=False)
        assert_usage_error(done, f"{option} {file}")
    done = run_python("bench/profile_step.py", *words, "--ranks", 500, cwd=tmp_path, packages=False)
    assert_usage_error(done, "--ranks 500", "at most one a GPU")


def test_scaling_with_mpi_but_no_mpirun_was_a_stack_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_python("bench/scaling.py", "--way", "mpi", cwd=tmp_path, packages=False)
    assert_usage_error(done, "--way mpi", "no mpirun")


def test_a_token_file_too_short_for_pytorch_was_a_stack_trace(tmp_path: Path) -> None:
    code = "import sys, data_order; data_order.Windows(sys.argv[1], 16)"
    for content, part in ((b"short", "not a token file"), (None, "10 tokens, expected more")):
        path = tmp_path / "x.bin"
        if content is None:
            run_python("bench/random_tokens.py", path, 10, cwd=tmp_path)
        else:
            path.write_bytes(content)
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True,
                              cwd=REPO_ROOT / "dev" / "bench", timeout=60)
        assert_one_line(done, str(path), part)


# ---------------------------------------------------------------- dev/data, the rest of dev/, grade


@pytest.mark.parametrize("name", ["fineweb", "hellaswag", "tinyshakespeare", "tinystories"])
def test_a_missing_package_of_a_data_script_is_one_line(name: str, tmp_path: Path) -> None:
    done = run_python(f"data/{name}.py", "--out", "out", cwd=tmp_path, packages=False)
    assert_one_line(done, "is missing; run: ", "pip install numpy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fineweb", "hellaswag", "tinystories"])
def test_a_missing_input_file_was_found_out_when_its_turn_came(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "One document."}\n')
    (tmp_path / "folder.json").mkdir()
    for wrong, part in (("none.json", "no such file"), ("folder.json", "a folder")):
        done = run_python(f"data/{name}.py", "--input", "a.json", wrong, "--out", "out",
                          cwd=tmp_path)
        assert_one_line(done, f"--input {wrong}", part)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, option, value, part", [
    *((name, option, value, "expected a folder, and ")
      for name in ("fineweb", "hellaswag", "tinyshakespeare", "tinystories")
      for option in ("--out", "--cache") for value in ("file", "file/x")),
    ("tinyshakespeare", "--tokenizer", "folder", "a folder, expected a file"),
    ("tinyshakespeare", "--tokenizer", "file/x.bin", "expected a file in a folder, and file is"),
])
def test_a_place_that_cannot_be_was_said_without_its_option(
    name: str, option: str, value: str, part: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = snapshot(tmp_path)
    words = [] if option == "--out" else ["--out", "out"]
    done = run_python(f"data/{name}.py", *words, option, value, cwd=tmp_path)
    assert_one_line(done, f"{option} {value}: ", part)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["fineweb", "hellaswag", "tinystories"])
def test_a_file_given_twice_was_both_validation_and_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"story": "One."}]')
    (tmp_path / "link.json").symlink_to("a.json")
    for again in ("a.json", "./a.json", tmp_path / "a.json", "link.json"):
        done = run_python(f"data/{name}.py", "--input", "a.json", again, "--out", "out",
                          cwd=tmp_path)
        assert_one_line(done, "the same file as a.json; expected each file once")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_what_is_no_archive_of_stories_was_five_lines(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(content)
    code = ("import sys, pathlib, tinystories as t; "
            "t.run_script(lambda: list(t.read_archive(pathlib.Path(sys.argv[1]))))")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True,
                          cwd=REPO_ROOT / "dev" / "data", timeout=60)
    assert_one_line(done, f"{path}: not a readable tar archive (")


def test_a_tool_without_its_package_is_one_line(tmp_path: Path) -> None:
    done = run_python("plot_log.py", "main.log", cwd=tmp_path, packages=False)
    assert_one_line(done, "'matplotlib' is missing", "pip install matplotlib")
    done = run_python("check.py", cwd=REPO_ROOT, packages=False)
    assert_one_line(done, "'lizard' is missing", "make setup")


def test_run_tests_with_a_bad_argument_was_a_stack_trace(tmp_path: Path) -> None:
    skips, file = tmp_path / "skips.txt", tmp_path / "file"
    skips.touch()
    file.write_bytes(b"\xff")
    out = ["--out", tmp_path / "out"]
    for unit in ("true", "true=", "=true"):
        done = run_python("run_tests.py", "--skips", skips, *out, "--unit", unit, cwd=tmp_path)
        assert_usage_error(done, f"--unit {unit}", "LABEL=PROGRAM")
    done = run_python("run_tests.py", "--skips", tmp_path / "none", *out, cwd=tmp_path)
    assert_one_line(done, f"{tmp_path}/none")
    done = run_python("run_tests.py", "--skips", file, *out, cwd=tmp_path)
    assert_one_line(done, f"--skips {file}", "not a text file")
    done = run_python("run_tests.py", "--skips", skips, "--out", file, cwd=tmp_path)
    assert_one_line(done, str(file))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["#!/bin/sh\necho hello\n", "no program"])
def test_grade_with_other_checks_skipped_all_or_was_a_stack_trace(
    content: str, tmp_path: Path
) -> None:
    checks = tmp_path / "checks"
    checks.write_text(content)
    checks.chmod(0o755)
    command = [REPO_ROOT / "grade", "A4", "--backend", "cpu", "--trainer", checks]
    done = subprocess.run([*command, "--checks", checks], capture_output=True, text=True,
                          cwd=tmp_path, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    assert f"{checks}: not a build of test/grade/checks.cu" in done.stderr


# --------------------------------------------------------------------------------- shell scripts

ONE_MACHINE = [f"scripts/run_{name}.sh" for name in (
    "gpt2_124M", "gpt2_350M", "gpt2_774M", "gpt2_1558M", "gpt3_125M")]
MULTI_NODE = [f"scripts/multi_node/run_gpt2_124M_{end}" for end in (
    "mpi.sh", "tcp.sbatch", "fs.sbatch")]
DEV = ["dev/demo.sh", "dev/setup.sh", "dev/gpu_carry.sh", "dev/gpu_check.sh",
       "dev/bench/four_gpus.sh", "dev/bench/comm.sh"]
SLURM_JOB = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1",
             "SLURM_GPUS_ON_NODE": "2"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the scripts, and in stubs/ tools that do nothing: what a script does before it
    looks at its arguments stays here."""
    for name in ("dev", "scripts"):
        shutil.copytree(REPO_ROOT / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("results", "__pycache__", "*.bin"))
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for tool in ("make", "apt-get", "apt-cache", "python3", "g++", "nvidia-smi", "mpirun"):
        (stubs / tool).write_text("#!/bin/sh\nexit 9\n")
        (stubs / tool).chmod(0o755)
    return tmp_path


def run_shell(tree: Path, script: str, *words: object, **env: object) -> Done:
    """Runs a script from the tree's root; BINARY is a program that fails at once."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM", "CUDA")) and name not in ("PROGRAM", "CARRY")}
    path = f"{tree / 'stubs'}:{kept['PATH']}"
    given = {name: str(value) for name, value in env.items()}
    return subprocess.run([str(tree / script), *map(str, words)], capture_output=True, text=True,
                          cwd=tree, env={**kept, "PATH": path, "BINARY": "false", **given},
                          stdin=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize("script", ONE_MACHINE + MULTI_NODE + DEV)
def test_help_of_a_shell_script_did_its_work(script: str, tree: Path) -> None:
    before = snapshot(tree)
    done = run_shell(tree, script, "--help")
    assert (done.returncode, done.stderr) == (0, ""), done
    head = (tree / script).read_text().splitlines()[1].removeprefix("# ")
    assert done.stdout.startswith(head) and "#" not in done.stdout.split("Settings:")[0], done
    if script.startswith("scripts/"):
        settings = done.stdout.split("Settings:\n")[1].splitlines()
        names = [line.split("=")[0] for line in settings]
        assert len(set(names)) == len(names) and {"STEPS", "RETRY_WAIT_S"} <= set(names), done
    assert snapshot(tree) == before


@pytest.mark.parametrize("script, words, parts", [
    *((script, ["4"], ["4: unknown", "--help"]) for script in ONE_MACHINE + MULTI_NODE),
    ("dev/demo.sh", ["fast"], ["fast: unknown", "--help"]),
    ("dev/setup.sh", ["--nonsense"], ["--nonsense: unknown", "--help"]),
    ("dev/gpu_carry.sh", ["a", "b"], ["a b: must be one folder"]),
    ("dev/gpu_carry.sh", ["--force"], ["--force: must be one folder"]),
    ("dev/gpu_check.sh", ["build", "tset"], ["tset: must be build, test"]),
    ("dev/bench/four_gpus.sh", ["grade", "all"], ["all: must be grade, equal"]),
], ids=str)
def test_a_wrong_argument_of_a_shell_script_was_not_seen_or_too_late(
    script: str, words: list[str], parts: list[str], tree: Path
) -> None:
    before = snapshot(tree)
    assert_one_line(run_shell(tree, script, *words), *parts)
    assert snapshot(tree) == before


@pytest.mark.parametrize("folder", ["dev", "scripts/lib.sh", "prefix"])
def test_gpu_carry_removed_whatever_folder_it_was_given(folder: str, tree: Path) -> None:
    for name in ("include", "lib"):  # as a library's installation has them
        (tree / "prefix" / name).mkdir(parents=True)
    before = snapshot(tree)
    assert_one_line(run_shell(tree, "dev/gpu_carry.sh", folder), f"{folder}: holds something else")
    assert snapshot(tree) == before


BAD_NUMBERS = {
    "RETRY_WAIT_S": ["soon", "-1", "1.5", " ", "1e3", "08", "86401", "99999999999999999999"],
    "GPUS": ["all", "-1", "0", "1.5", " ", "257", "99999999999999999999"],
    "STEPS": ["x", "0", "100000000", "99999999999999999999"],
    "MAX_FAILURES": ["0", "99999999999999999999"],
    "TOTAL_BATCH": ["0.5M", "0"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name in BAD_NUMBERS
                                         for value in BAD_NUMBERS[name]])
def test_numbers_from_the_environment_were_not_checked(name: str, value: str, tree: Path) -> None:
    """RETRY_WAIT_S was found out between two tries, and with a STEPS beyond bash's numbers the run
    was said to be done."""
    before = snapshot(tree)
    done = run_shell(tree, ONE_MACHINE[0], **{"GPUS": 1, name: value})
    assert_one_line(done, f"{name}={value}: must be a whole number from ")
    assert snapshot(tree) == before


def test_an_empty_setting_is_its_default(tree: Path) -> None:
    done = run_shell(tree, ONE_MACHINE[0], GPUS=1, RETRY_WAIT_S="", MAX_FAILURES=1, OUTPUT="out")
    assert_one_line(done, "no new checkpoint after 1 tries")
    assert not (tree / "out").exists(), "nothing was written into it"
    before = snapshot(tree)
    assert_one_line(run_shell(tree, ONE_MACHINE[0], GPUS=""), "no GPU found here; set GPUS")
    assert snapshot(tree) == before


@pytest.mark.parametrize("script, env, part", [
    (ONE_MACHINE[0], {"GPUS": 1, "OUTPUT": "scripts/lib.sh"}, "OUTPUT=scripts/lib.sh: no folder"),
    (ONE_MACHINE[0], {"GPUS": 1, "PRICE_PER_GPU_HOUR": "cheap"}, "PRICE_PER_GPU_HOUR=cheap: must"),
    (MULTI_NODE[0], {"GPUS_PER_NODE": "all"}, "GPUS_PER_NODE=all: must be a whole number"),
    (MULTI_NODE[0], {"GPUS_PER_NODE": "1", "MPIRUN": "none"}, "MPIRUN=none: no such program"),
    (MULTI_NODE[0], {"HOSTFILE": "dev"}, "HOSTFILE=dev: cannot be read"),
    *((script, {**SLURM_JOB, name: value}, f"{name}={value}: must be a whole number from ")
      for script in MULTI_NODE[1:]
      for name, value in (("GPUS_PER_NODE", "-1"), ("RETRY_WAIT_S", "x"), ("EXIT_WAIT_S", "0"))),
    (MULTI_NODE[1], {**SLURM_JOB, "PORT": "70000"}, "PORT=70000: must be a whole number from 1"),
    ("dev/bench/comm.sh", {}, "PROGRAM=: must be the benchmark"),
    ("dev/bench/comm.sh", {"PROGRAM": "dev"}, "PROGRAM=dev: must be the benchmark"),
    *(("dev/bench/comm.sh", {"PROGRAM": "/bin/true", "NP": n}, f"NP={n}: must be a whole number")
      for n in ("0", "x", "-2", "1000")),
    ("dev/bench/four_gpus.sh", {"STRICT": "yes"}, "STRICT=yes: must be 0 or 1"),
    ("dev/bench/four_gpus.sh", {}, "0 GPUs here, two are needed"),
    ("dev/gpu_check.sh", {"CARRY": "none"}, "CARRY=none: no such folder"),
], ids=str)
def test_a_bad_variable_was_found_out_late_or_never(
    script: str, env: dict[str, object], part: str, tree: Path
) -> None:
    before = snapshot(tree)
    assert_one_line(run_shell(tree, script, **env), part)
    assert snapshot(tree) == before


@pytest.mark.parametrize("script, env, part", [
    (MULTI_NODE[2], {**SLURM_JOB, "MEETING_FOLDER": "/etc/passwd"}, "MEETING_FOLDER=/etc/passwd: "),
    *((script, {**SLURM_JOB, "REPO": folder}, f"REPO={folder}: not the repository")
      for script in MULTI_NODE for folder in ("/nope", "dev")),
    *((script, {**SLURM_JOB, "SLURM_NNODES": ""}, "but not SLURM_NNODES") for script in MULTI_NODE),
    *((script, {**SLURM_JOB, "SLURM_JOB_NODELIST": ""}, "but not SLURM_JOB_NODELIST")
      for script in MULTI_NODE[1:]),
    *((script, {**SLURM_JOB, "GPUS_PER_NODE": 0}, "GPUS_PER_NODE=0: must be a whole number from 1")
      for script in MULTI_NODE),
    *((script, {**SLURM_JOB, "REQUEUE": value}, f"REQUEUE={value}: must be 0 or 1")
      for script in MULTI_NODE[1:] for value in ("2", "yes")),
], ids=str)
def test_multi_node_scripts_showed_errors_of_bash(
    script: str, env: dict[str, object], part: str, tree: Path
) -> None:
    (tree / "stubs" / "srun").write_text("#!/bin/sh\necho started >&2\n")
    (tree / "stubs" / "srun").chmod(0o755)
    before = snapshot(tree)
    assert_one_line(run_shell(tree, script, **env), part)
    assert snapshot(tree) == before


@pytest.mark.parametrize("hosts, part", [
    ("a slots=2\nb\n", "the same number of slots"),
    ("a\nb slots=2 # two\n", "the same number of slots"),
    ("a slots=2\nb slots=3\n", "the same number of slots"),
    ("# none\n\n", "no hosts"),
    ("a slots=0\n", "GPUS_PER_NODE=0: must be a whole number"),
    ("# a\na slots=2\n\n  b slots=2 max_slots=4\n", "no new checkpoint"),
])
def test_a_host_without_slots_beside_one_with_was_taken(
    hosts: str, part: str, tree: Path
) -> None:
    (tree / "hosts").write_text(hosts)
    done = run_shell(tree, MULTI_NODE[0], HOSTFILE="hosts", MAX_FAILURES=1)
    assert_one_line(done, part)


def test_a_word_after_help_was_not_seen(tree: Path) -> None:
    assert_one_line(run_shell(tree, ONE_MACHINE[0], "--help", "x"), "x: unknown", "--help")
