"""The Makefile and the test runner: what a user meets before the first training step.

These tests build nothing: they read what make prints, or would do, or have the compiler look at
syntax alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
RUN_TESTS = REPO_ROOT / "dev" / "run_tests.py"
LIBRARIES = {
    "NCCL": ("NCCL_PATH", "nccl.h", "nccl"),
    "OpenMPI": ("OPENMPI_DIR", "mpi.h", "mpi"),
    "cuDNN": ("CUDNN_PATH", "cudnn.h", "cudnn"),
    "OpenBLAS": ("OPENBLAS_PATH", "cblas.h", "openblas"),
    "Gloo": ("GLOO_PATH", "gloo/context.h", "gloo"),
    "GoogleTest": ("GTEST_PATH", "gtest/gtest.h", "gtest"),
}


def make(*arguments: str) -> subprocess.CompletedProcess:
    """Runs make as a user would, without what an outer make has set."""
    outer = ("MAKE", "MFLAGS", "REPORT", "PRECISION", "GRAD_PRECISION", "SANITIZE", "PYTEST_ARGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=REPO_ROOT, env=env, capture_output=True, text=True, timeout=240,
    )


def install(prefix: Path, header: str, library: str) -> None:
    for path in (prefix / "include" / header, prefix / "lib" / f"lib{library}.so"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def report_line(title: str, *arguments: str) -> str:
    lines = make("check-deps", *arguments).stdout.splitlines()
    found = [line for line in lines if re.match(rf"[✓✗] {title}( \(|:)", line)]
    assert len(found) == 1, lines
    return found[0]


# ------------------------------------------------------------------------------------ libraries


@pytest.mark.parametrize("title", LIBRARIES)
def test_a_library_is_found_under_the_path_given(title: str, tmp_path: Path) -> None:
    variable, header, library = LIBRARIES[title]
    install(tmp_path, header, library)
    assert report_line(title, f"{variable}={tmp_path}") == f"✓ {title} ({tmp_path}/lib)"


@pytest.mark.parametrize("title", LIBRARIES)
def test_an_empty_path_hides_the_system_library(title: str, tmp_path: Path) -> None:
    variable = LIBRARIES[title][0]
    line = report_line(title, f"{variable}={tmp_path}")
    assert line.startswith(f"✗ {title}: not found in {variable}={tmp_path}; to get it: ")


def test_libvncclient_was_taken_for_nccl(tmp_path: Path) -> None:
    install(tmp_path, "rfb/rfbclient.h", "vncclient")
    assert report_line("NCCL", f"NCCL_PATH={tmp_path}").startswith("✗ NCCL")


@pytest.mark.parametrize("lost", ["header", "library"])
def test_half_a_library_is_not_found(lost: str, tmp_path: Path) -> None:
    install(tmp_path, "nccl.h", "nccl")
    (tmp_path / ("include/nccl.h" if lost == "header" else "lib/libnccl.so")).unlink()
    assert report_line("NCCL", f"NCCL_PATH={tmp_path}").startswith("✗ NCCL")


def test_nvcc_is_found_under_cuda_home(tmp_path: Path) -> None:
    line = report_line("nvcc", f"CUDA_HOME={tmp_path}")
    assert line.startswith(f"✗ nvcc: not found in CUDA_HOME={tmp_path}; to get it: ")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert report_line("nvcc", f"CUDA_HOME={tmp_path}") == f"✓ nvcc ({tmp_path}/bin/nvcc)"


def test_the_cpu_build_without_openblas_stops_with_one_line(tmp_path: Path) -> None:
    # A folder of its own, so that the build of these tests is left alone.
    result = make("train_gpt2cpu", "CPU_ARCH=x86-64", f"OPENBLAS_PATH={tmp_path}", "REPORT=0", "-n")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "OpenBLAS: not found" in result.stderr and "libopenblas-dev" in result.stderr


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_the_build_without_multi_gpu_did_not_compile_any_more(
    precision: str, tmp_path: Path
) -> None:
    """It is the one that a machine without NCCL gets; only its syntax is looked at here."""
    target = tmp_path / f"cpu-{precision.lower()}" / "train_gpt2cpu"
    result = make("REPORT=0", "NO_MULTI_GPU=1", f"PRECISION={precision}", f"BUILD={tmp_path}",
                  "TRAINER_OPT=-fsyntax-only", str(target))
    assert result.returncode == 0 and "-DMULTI_GPU" not in result.stdout, result
    assert "-fsyntax-only" in result.stdout, result


# ------------------------------------------------------------------------------------ variables


@pytest.mark.parametrize(
    "assignment, right",
    [
        ("PRECISION=FP16", "FP32 or BF16"),
        ("PRECISION=bf16", "FP32 or BF16"),
        ("GRAD_PRECISION=BF16", "FP32"),
        ("NO_MULTI_GPU=yes", "0 or 1"),
        ("SANITIZE=memory", "address or thread"),
    ],
)
def test_a_wrong_variable_is_one_line(assignment: str, right: str) -> None:
    result = make("train_gpt2cpu", assignment)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert assignment in result.stderr and right in result.stderr


def test_each_choice_of_variables_has_its_own_folder() -> None:
    choices = [
        [], ["PRECISION=BF16"], ["PRECISION=BF16", "GRAD_PRECISION=FP32"], ["CPU_ARCH=x86-64"],
        ["NO_MULTI_GPU=1"], ["NO_USE_MPI=1"], ["SANITIZE=address"], ["SANITIZE=thread"],
    ]
    folders = []
    for choice in choices:
        output = make("-n", "-B", "REPORT=0", "train_gpt2cpu", *choice).stdout
        folders.append(re.findall(r"-o (\S+)/train_gpt2cpu", output)[0])
    assert folders[:3] == ["build/cpu-fp32", "build/cpu-bf16", "build/cpu-bf16-gradfp32"]
    assert len(set(folders)) == len(choices)


def test_another_version_of_the_compiler_builds_anew(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    for version in ("12.9.8", "12.9.9"):
        compiler.write_text('#!/bin/sh\ncase $1 in --version) echo "g++ (Debian '
                            f'{version}-1) {version}";; *) exec g++ "$@";; esac\n')
        compiler.chmod(0o755)
        for name in ("trainer", "unit", "grade"):
            stamp = f"build/cpu-fp32/{name}.flags"
            output = make("-n", "-B", "REPORT=0", f"CXX={compiler}", stamp).stdout
            # What is compared with the file, and what is written to it.
            assert output.count(f"g++ (Debian {version}-1) {version}") == 2, output


def run_setup(commands: Path, *arguments: str) -> subprocess.CompletedProcess:
    """dev/setup.sh with the programs in `commands` in place of the system's."""
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(REPO_ROOT / "dev" / "setup.sh"), *arguments],
        env=env, capture_output=True, text=True, timeout=240,
    )


def test_setup_installs_optional_packages_only_where_they_exist(tmp_path: Path) -> None:
    # apt-get and apt-cache of a machine that has one of two packages.
    calls = tmp_path / "calls"
    for name, body in {
        "apt-get": f'echo "$@" >>{calls}',
        "apt-cache": '[ "$2" = not-here ] || echo Package: "$2"',
        "id": "echo 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    result = run_setup(tmp_path, "needed", "--optional=not-here", "--optional=extra")
    assert result.returncode == 0, result.stderr
    assert "no package not-here" in result.stdout
    update, install = calls.read_text().splitlines()
    assert update.startswith("update") and install.endswith(" needed extra")


def test_setup_without_root_prints_the_line_to_run(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "apt-get").chmod(0o755)
    result = run_setup(tmp_path, "libopenblas-dev", "--optional=libgloo-dev")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "sudo apt-get install libopenblas-dev libgloo-dev"


def test_help_names_every_variable_and_target() -> None:
    output = make("help").stdout
    text = (REPO_ROOT / "Makefile").read_text()
    for variable in re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE):
        assert re.search(rf"^  {variable} +\S", output, re.MULTILINE), variable
    for target in ("train_gpt2cpu", "train_gpt2cu", "test", "demo", "data", "setup", "clean",
                   "bench", "bench_cpu"):
        assert re.search(rf"^  {target} +\S", output, re.MULTILINE), target


def test_make_test_builds_every_set_of_variables() -> None:
    output = make("-n", "-B", "REPORT=0", "GRAD_PRECISION=FP32", "build_tests").stdout
    programs = re.findall(r" -o build/(\S+/[a-z_0-9]+)(?= )", output)
    assert set(programs) == {
        "cpu-fp32/train_gpt2cpu", "cpu-fp32/unit_tests", "cpu-fp32/bench_forward",
        "cpu-bf16/train_gpt2cpu", "cpu-bf16/unit_tests", "cpu-bf16/grade_checks",
        "cpu-bf16-switches/train_gpt2cpu", "nompi/cpu-fp32/train_gpt2cpu",
        "cpu-fp32-asan/unit_tests",
    }
    for name, level in {"test_matmul": "-O1", "test_tree": "-O0"}.items():
        (line,) = re.findall(rf"^.* -o build/cpu-fp32-asan/unit/{name}\.o$", output, re.MULTILINE)
        assert "-fsanitize=address,undefined" in line and level in line.split()
        # It is precompiled at -O0.
        assert ("-include build/cpu-fp32-asan/unit/googletest.h " in line) == (level == "-O0")


@pytest.mark.parametrize("target, level", [("test", "-O1"), ("test_full", "-O3")])
def test_the_full_tests_build_all_trainers_as_they_ship(target: str, level: str) -> None:
    output = make("-n", "-B", "REPORT=0", target).stdout
    for folder in ("cpu-fp32", "cpu-bf16", "cpu-bf16-switches", "nompi/cpu-fp32"):
        (line,) = re.findall(rf"^.* -o build/{folder}/train_gpt2cpu .*$", output, re.MULTILINE)
        for_tests_alone = "switches" in folder or "nompi" in folder
        assert (level if for_tests_alone else "-O3") in line.split(), line


def test_bench_without_a_gpu_builds_nothing() -> None:
    output = make("-n", "bench", "GPU=", "REPORT=0").stdout
    assert "dev/bench/bench.py" in output and "train_gpt2.cu" not in output


@pytest.mark.parametrize("target", ["tune", "profile", "test_shared_gpu"])
def test_without_a_gpu_nothing_is_compiled_before_that_is_said(
    target: str, tmp_path: Path
) -> None:
    result = make(target, "GPU=", f"BUILD={tmp_path}")
    assert result.returncode == 2 and f"make {target} needs a GPU" in result.stderr, result
    assert not result.stdout and not list(tmp_path.iterdir()), result


# ---------------------------------------------------------------------------------- test runner


def run_tests(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(RUN_TESTS), "--skips", "skips.txt", "--out", "out", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=280,
    )


PASSES = "def test_passes(): pass\n"
SKIPS = "@pytest.mark.parametrize('n', [7])\ndef test_skips(n): pytest.skip('why')\n"


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    "source, skips, status, summary",
    [
        (PASSES, "", 0, "1 passed, 0 failed"),
        (PASSES + "def test_fails(): assert 0\n", "", 1, "1 passed, 1 failed"),
        (PASSES + SKIPS, "", 1, "1 passed, 0 failed, 1 skipped"),
        (PASSES + SKIPS, "# why\ntest_x.py::test_skips[7]\n", 0, "1 passed, 0 failed, 1 skipped"),
        (PASSES + SKIPS, "test_x.py::test_skips\n", 1, "1 passed, 0 failed, 1 skipped"),
        ("pytest.skip('all', allow_module_level=True)\n", "", 1, "0 passed, 0 failed, 1 skipped"),
        ("import no_such_module\n" + PASSES, "", 1, "0 passed, 1 failed"),
        ("", "", 1, "0 passed, 1 failed"),
    ],
    ids=["passes", "fails", "skips", "listed skip", "listed without parameters", "module skips",
         "does not import", "no test"],
)
def test_the_summary_counts_and_the_status_follows(
    source: str, skips: str, status: int, summary: str, jobs: int, tmp_path: Path
) -> None:
    (tmp_path / "skips.txt").write_text(skips)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_x.py").write_text("import pytest\n" + source)
    result = run_tests(tmp_path, "--jobs", str(jobs), "--pytest", "test_x.py")
    assert result.stdout.splitlines()[-1] == summary, result.stdout
    assert result.returncode == status, result.stdout


@pytest.mark.parametrize(
    "jobs, failed, summary",
    [
        (1, "pytest ended with status 3", "0 passed, 1 failed"),
        (2, "test_x.py::test_dies", "2 passed, 1 failed"),
    ],
)
def test_a_test_that_ends_its_process_is_one_failure(
    jobs: int, failed: str, summary: str, tmp_path: Path
) -> None:
    (tmp_path / "skips.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_x.py").write_text(f"import os\n{PASSES}def test_dies(): os._exit(3)\n")
    (tmp_path / "test_y.py").write_text(PASSES)
    result = run_tests(tmp_path, "--jobs", str(jobs), "--pytest", ".")
    assert f"FAILED {failed}\n" in result.stdout, result.stdout
    assert result.stdout.splitlines()[-1] == summary, result.stdout
    assert result.returncode == 1


def test_a_unit_test_program_that_crashes_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "skips.txt").touch()
    program = tmp_path / "unit_tests"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    result = run_tests(tmp_path, "--unit", f"x={program}")
    assert result.returncode == 1
    assert "FAILED x ended with status -11" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 passed, 1 failed"


def test_unit_tests_beside_pytest_are_counted_with_it(tmp_path: Path) -> None:
    """Each waits for the other, so that one after the other they would not end."""
    (tmp_path / "skips.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    wait = "import pathlib, time\nwhile not pathlib.Path({}).exists(): time.sleep(0.01)\n"
    program = tmp_path / "unit_tests"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nprint('of the unit tests')\n"
        "open('unit', 'w').close()\n" + wait.format("'python'") +
        "file = sys.argv[2].split(':', 1)[1]\n"
        "open(file, 'w').write('<a><testcase classname=\"A\" name=\"B\"/></a>')\n"
        "sys.exit('fails at its end')\n"
    )
    program.chmod(0o755)
    (tmp_path / "test_x.py").write_text(wait.format("'unit'") + PASSES)
    (tmp_path / "test_y.py").write_text(
        "def test_ends_the_wait():\n    open('python', 'w').close()\n    assert 0\n")
    result = run_tests(tmp_path, "--jobs", "2", "--unit", f"x={program}", "--pytest", ".")
    assert "=== x, output in out/x.log\n" in result.stdout, result.stdout
    assert "=== x\nof the unit tests\nfails at its end\n=== x: " in result.stdout, result.stdout
    assert "FAILED test_y.py::test_ends_the_wait" in result.stdout
    assert "FAILED x ended with status 1" in result.stdout
    assert result.stdout.splitlines()[-1] == "2 passed, 2 failed", result.stdout
    assert result.returncode == 1


# As GoogleTest prints it: one test passes, the next one starts a program and hangs.
HANGS = """import subprocess, sys, time
print('[----------] 2 tests from A')
print('[ RUN      ] A.Passes')
print('[       OK ] A.Passes (0 ms)')
print('[ RUN      ] A.Hangs', flush=True)
"""
# In a session of its own, as the tests start theirs, and deaf to what is not SIGKILL.
STARTS = """import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
with open({0!r} + '.part', 'w') as file:
    print(child.pid, file=file)
__import__('os').rename({0!r} + '.part', {0!r})
time.sleep(1000)
"""


def processes_in(folder: Path) -> list[int]:
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_stopped_run_leaves_no_process_behind_and_names_the_test(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / "skips.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    program = tmp_path / "unit_tests"
    program.write_text(f"#!{sys.executable}\n{HANGS}{STARTS.format('unit')}")
    program.chmod(0o755)
    body = "".join(f"    {line}\n" for line in STARTS.format("python").splitlines())
    (tmp_path / "test_x.py").write_text(f"import subprocess, time\ndef test_hangs():\n{body}")
    run = subprocess.Popen(
        [sys.executable, str(RUN_TESTS), "--skips", "skips.txt", "--out", "out", "--jobs", "2",
         "--unit", f"x={program}", "--unit", f"never={program}", "--pytest", "test_x.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )
    try:
        started = [tmp_path / "unit", tmp_path / "python"]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in started) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = {int(file.read_text()) for file in started}
        assert children < set(processes_in(tmp_path))
        assert "A.Passes (0 ms)" in (tmp_path / "out" / "x.log").read_text()
        if number == signal.SIGINT:  # as a terminal does
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        printed, _ = run.communicate(timeout=60)
        assert not processes_in(tmp_path), printed
    finally:
        for process in processes_in(tmp_path):
            os.kill(process, signal.SIGKILL)
    assert run.returncode == 128 + number, printed
    assert f"error: stopped by {signal.Signals(number).name}" in printed
    assert "\n=== x\n[ RUN      ] A.Hangs\n=== x: " in printed
    assert "=== never" not in printed


def test_a_debugger_has_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "skips.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_x.py").write_text(
        "def test_value():\n    value = 6 * 7\n    assert not value\n")
    result = subprocess.run(
        [sys.executable, str(RUN_TESTS), "--skips", "skips.txt", "--out", "out", "--jobs", "2",
         "--pytest", "--pdb", "test_x.py"],
        cwd=tmp_path, input="p 'value', value\nq\n", capture_output=True, text=True, timeout=280,
    )
    assert "('value', 42)" in result.stdout, result.stdout
    assert "FAILED test_x.py::test_value\n" in result.stdout


# ------------------------------------------------------------------------------------- dev/check.py


@pytest.mark.parametrize("file, line, found", [
    ("llmc/x.cuh", "cudaMemcpy(to, from, 4, kind);", True),
    ("llmc/x.cuh", "cuda_check(cudaMemset(to, 0, 4));", True),
    ("llmc/x.cuh", "cudaMemcpyToSymbol(to, from, 4);", True),
    ("train_gpt2.cu", "cudaMemcpy2D(to, 4, from, 4, 4, 4, kind);", True),
    ("llmc/x.cuh", "cudaMemcpyAsync(to, from, 4, kind, stream);", False),
    ("llmc/x.cuh", "cudaMemcpy2DAsync(to, 4, from, 4, 4, 4, kind, stream);", False),
    ("llmc/x.cuh", "// cudaMemcpy(...) uses the default stream.", False),
    ("llmc/cpu/x.h", "cudaMemcpy(to, from, 4, kind);", False),
    ("test/gpu/x.cu", "cudaMemcpy(to, from, 4, kind);", False),
])
def test_300_copies_on_the_default_stream_slowed_all_graphs_down(
    file: str, line: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPO_ROOT / "dev"))
    import check

    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(line + "\n")
    assert bool(check.check_text(Path(file))) == found
