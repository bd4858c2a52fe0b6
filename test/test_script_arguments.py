"""Scripts and what they are given: --help prints help, needs no package and writes nothing; a bad
argument or variable is one clear line, before anything is done.

Python without its packages is `python -S -E`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPO_ROOT

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


# ------------------------------------------------------------------------------------- dev/bench


@pytest.mark.parametrize("script", [
    "bench/bench.py", "bench/bench_cpu.py", "bench/compare_torch.py", "bench/profile_step.py",
    "bench/random_tokens.py", "bench/scaling.py", "bench/torch_gpt2.py",
])
def test_help_needed_packages(script: str, tmp_path: Path) -> None:
    done = run_python(script, "--help", cwd=tmp_path, packages=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: "), done
    assert not list(tmp_path.iterdir())


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
