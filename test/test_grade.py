"""./grade A4 on the CPU build: all points when all is well, and a broken component shows in its own
line and in those that depend on it.

The build with switches breaks the components, by LLMC_FAULT. Two gradings run at a time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, Mapping

import pytest

from helpers import REPO_ROOT

GRADE = REPO_ROOT / "grade"
POINTS = {
    "mpi": 15, "fs": 10, "local": 5, "free": 5, "shards": 10, "zero0": 15, "zero1": 15,
    "update": 15, "loss": 10, "tcp": 10,
}
# What is broken; the lines that must fail; those that may, too, since they depend on what is broken
# but do not always show it (a race, or how MPI takes it that a process does not end it).
FAULTS: dict[str, tuple[set[str], set[str]]] = {
    "mpi_rank": ({"mpi"}, set()),
    "fs_id": ({"fs"}, set()),
    "tcp_id": ({"tcp"}, set()),
    "local_index": ({"local"}, set()),
    "no_free": ({"free"}, {"update", "loss"}),
    "no_barrier": ({"free"}, set()),
    "no_float_sum": ({"free"}, set()),
    "shard_offset": ({"shards", "zero1", "update", "loss"}, set()),
    "zero_configs": ({"shards"}, set()),
    "early_reduce": ({"zero0", "zero1"}, {"update", "loss"}),
    "host_waits": ({"zero0", "zero1"}, set()),
    "zero0_no_gather": ({"zero0", "loss"}, set()),
    "zero1_wrong_shard": ({"zero1", "update", "loss"}, set()),
    "swapped_children": ({"zero0", "zero1", "update", "loss"}, set()),
    "no_weight_gather": ({"update", "loss"}, set()),
    "early_gather": ({"update"}, {"loss"}),
    "divided_twice": ({"update", "loss"}, set()),
    "rank_seed": ({"update", "loss"}, set()),
}
# How functions begin that the advice names.
FUNCTIONS = ("multi_gpu_", "get_nccl", "send_nccl", "gpt2_", "start_by", "exchange_", "advance_",
             "gather_", "update_group", "set_zero", "close_", "join_")
FOUR_RANKS = {"swapped_children"}  # two ranks cannot show it

Graded = subprocess.CompletedProcess


def run_grade(
    *args: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Graded:
    command = [str(GRADE), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=cwd,
                          env={**os.environ, **(env or {})})


def results(graded: Graded) -> dict[str, str]:
    """PASS, FAIL or SKIP by component."""
    components = json.loads(graded.stdout)["components"]
    return {each["name"]: each["result"] for each in components}


@pytest.fixture(scope="module")
def gradings(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Graded]]]:
    """One grading for each fault whose test was chosen, of the build with switches."""
    build = Path(request.config.getoption("--build-dir")).resolve()
    programs = ["--trainer", build / "cpu-bf16-switches" / "train_gpt2cpu",
                "--checks", build / "cpu-bf16" / "grade_checks"]
    chosen = [fault for fault in FAULTS
              if any(item.name.endswith(f"[{fault}]") for item in request.session.items)]
    with ThreadPoolExecutor(2) as pool:
        yield {
            fault: pool.submit(run_grade, "A4", "--backend", "cpu", "--json", *programs,
                               "--ranks", 4 if fault in FOUR_RANKS else 2,
                               env={"LLMC_FAULT": fault})
            for fault in chosen
        }


def test_all_points_on_the_cpu(tmp_path: Path) -> None:
    """As a user calls it, from another folder."""
    graded = run_grade("A4", "--backend", "cpu", "--strict", cwd=tmp_path)
    assert graded.returncode == 0, graded.stdout + graded.stderr
    lines = [line for line in graded.stdout.splitlines() if not line.startswith("building")]
    assert len(lines) == len(POINTS) + 1
    for line, points in zip(lines, POINTS.values()):
        assert line.startswith(f"PASS {points:2}/{points:<2} "), graded.stdout
    assert "on 1, 2, 4 ranks, same bits" in lines[-3], graded.stdout
    assert lines[-1] == "total 100 of 100 points, bonus 10 of 10"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_component_fails_its_line(
    gradings: dict[str, Future[Graded]], fault: str
) -> None:
    graded = gradings[fault].result()
    assert graded.returncode == 1, graded.stdout + graded.stderr
    must, may = FAULTS[fault]
    found = results(graded)
    failed = {name for name, result in found.items() if result == "FAIL"}
    assert must <= failed <= must | may, graded.stdout
    assert set(found.values()) == {"PASS", "FAIL"}, "nothing is skipped"
    for component in json.loads(graded.stdout)["components"]:
        is_failed = component["name"] in failed
        assert component["points"] == (0 if is_failed else POINTS[component["name"]])
        assert is_failed == bool(component["problems"])
        for problem in component["problems"]:
            looks = problem["look_at"]
            assert looks and all("llmc/" in look or "train_gpt2.cu" in look for look in looks)


def test_every_component_is_broken_once() -> None:
    assert set().union(*(must for must, _ in FAULTS.values())) == set(POINTS)


def test_files_and_functions_to_look_at_exist(gradings: dict[str, Future[Graded]]) -> None:
    """The advice names functions; they are where it says."""
    components = [component for future in gradings.values()
                  for component in json.loads(future.result().stdout)["components"]]
    looks = {look for c in components for problem in c["problems"] for look in problem["look_at"]}
    for look in looks:
        words = re.findall(r"[\w./]+", look)
        files = [word for word in words if word.startswith("llmc/") or word == "train_gpt2.cu"]
        text = "".join((REPO_ROOT / file).read_text() for file in files)
        for word in words:
            if word.startswith(FUNCTIONS):
                assert word in text, f"{word} is not in {files}"


def test_without_two_gpus_everything_is_skipped() -> None:
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    graded = run_grade("A4", env=no_gpu)
    lines = graded.stdout.splitlines()
    assert graded.returncode == 0 and not graded.stderr
    assert len(lines) == len(POINTS) + 1
    for line in lines[:-1]:
        assert line.startswith("SKIP  0/") and "needs 2 NVIDIA GPUs, 0 visible" in line
    none = "total 0 of 100 points, bonus 0 of 10, 10 components skipped"
    assert lines[-1] == f"{none}; --backend cpu checks the CPU build"
    assert run_grade("A4", "--strict", env=no_gpu).returncode == 2
    assert set(results(run_grade("A4", "--json", env=no_gpu)).values()) == {"SKIP"}


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_two_gpus_as_far_as_a_cpu_can_stand_for_them(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """The CPU build with a tool that lists two GPUs. Whether times pass is left open."""
    build = Path(pytestconfig.getoption("--build-dir")).resolve() / "cpu-bf16"
    write_program(tmp_path / "nvidia-smi", "printf 'GPU 0: a\\nGPU 1: b\\n'")
    trainer = write_program(tmp_path / "trainer", f"""
        for word; do
            case $word in
                32768) word=128 ;; 1024) word=16 ;; 4) word=1 ;; d12) word=custom:L1C8H1T16V50257 ;;
            esac
            shift
            set -- "$@" "$word"
        done
        exec {build}/train_gpt2cpu "$@" """)
    checks = write_program(tmp_path / "checks", f"""
        rank=${{OMPI_COMM_WORLD_RANK:-0}}
        for word; do
            [ "$last" != --rank ] || [ -n "$OMPI_COMM_WORLD_RANK" ] || rank=$word
            last=$word
        done
        text=$({build}/grade_checks "$@")
        status=$?
        printf '%s\\n' "$text" | sed "s/device=0\\tcurrent=0/device=$rank\\tcurrent=$rank/"
        exit $status""")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"}
    graded = run_grade("A4", "--json", "--trainer", trainer, "--checks", checks, env=env)
    components = {each["name"]: each for each in json.loads(graded.stdout)["components"]}
    for name, component in components.items():
        assert component["result"] == "PASS" or name == "tcp", component
    assert "4 GPUs: not run" in components["loss"]["notes"]
    assert any("a step takes" in note for note in components["tcp"]["notes"]), components["tcp"]


def test_a_build_for_one_process_is_skipped(tmp_path: Path) -> None:
    about = "about\\tbuild\\tbackend=cpu\\tmulti=0\\tmpi=0\\n"
    program = write_program(tmp_path / "checks", f"printf '{about}'")
    args = ["A4", "--backend", "cpu", "--trainer", program, "--checks", program]
    graded = run_grade(*args, "--json")
    assert graded.returncode == 0 and set(results(graded).values()) == {"SKIP"}
    assert graded.stdout.count("built without Gloo") == len(POINTS)
    assert run_grade(*args, "--strict").returncode == 2


def test_programs_that_crash_are_failures(tmp_path: Path) -> None:
    """No result is no pass, whatever the status."""
    about = "about\\tbuild\\tmulti=1\\tmpi=0\\n"
    program = write_program(tmp_path / "checks", f"[ $1 != about ] || printf '{about}'")
    args = ["A4", "--backend", "cpu", "--trainer", program, "--checks", program]
    graded = run_grade(*args, "--json")
    assert graded.returncode == 1
    expected = {name: "SKIP" if name in ("mpi", "local") else "FAIL" for name in POINTS}
    assert results(graded) == expected


@pytest.mark.parametrize("args, needle", [
    ([], "A4"), (["A5"], "A5"), (["A4", "--backend", "tpu"], "tpu"), (["A4", "--fast"], "--fast"),
    (["A4", "--ranks", "3"], "3"), (["A4", "--trainer", "grade"], "--checks"),
    (["A4", "--trainer", "nowhere", "--checks", "nowhere"], "nowhere"),
])
def test_wrong_arguments_are_one_line(args: list[str], needle: str) -> None:
    graded = run_grade(*args)
    assert graded.returncode in (1, 2) and not graded.stdout
    (line,) = graded.stderr.splitlines()
    assert needle in line


def test_help_names_the_options() -> None:
    graded = run_grade("--help")
    assert graded.returncode == 0
    for option in ("--backend", "--strict", "--json", "--ranks", "--trainer", "--checks"):
        assert option in graded.stdout
