"""`make profile`: the report on a small recording, the run around it, and the library's build.

test/profile_recording.tsv is what dev/profile.cpp would write of three steps of 3000 ns: two
launches of a graph of five kernels, a kernel of NCCL, one of nobody, AdamW. The first step ends at
12750.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPO_ROOT
from test_build import make

sys.path.insert(0, str(REPO_ROOT / "dev" / "bench"))

import profile_step  # noqa: E402
from profile_step import Limits, Model  # noqa: E402
from random_tokens import write_random_tokens  # noqa: E402

RECORDING = REPO_ROOT / "test" / "profile_recording.tsv"
MODEL = Model(layers=2, channels=64, padded_vocab=50304, parameters=10_000, weight_bytes=2,
              gradient_bytes=2, master=True, shards=1)
LIMITS = Limits(copy=4.2e12, flops=790e12)


@pytest.fixture
def lines() -> list[str]:
    return RECORDING.read_text().splitlines()


def report(lines: list[str], steps: int = 2) -> dict:
    return profile_step.report(profile_step.read_recording(lines), MODEL, LIMITS, steps)


def rows_of(result: dict) -> dict[str, dict]:
    return {row["launcher"]: row for row in result["rows"]}


@pytest.mark.parametrize("steps", [1, 2])
def test_sums_and_gaps_are_those_of_a_step(lines: list[str], steps: int) -> None:
    result = report(lines, steps)
    assert result["step_ms"] == pytest.approx(3000e-6)
    # Two graphs of 750 ns, the kernel of nobody, AdamW; NCCL's is apart.
    assert result["kernels_ms"] == pytest.approx((2 * 750 + 100 + 500) * 1e-6)
    assert result["nccl_ms"] == pytest.approx(100e-6)
    # 250 + 100 before the first graph, 50 in each, 200 between them; then 50, 50 and 50.
    assert result["idle_ms"] == pytest.approx((350 + 50 + 200 + 50 + 50 + 50 + 50) * 1e-6)
    assert result["longest_gaps_us"][0] == [0.35, "encoder_forward_kernel"]
    # The copy, two graphs, and three kernels.
    assert result["launches"] == 6
    assert result["kernels"] == 13 and result["kernels_in_graphs"] == 10


def test_rows_are_launchers_with_their_place_in_the_model(lines: list[str]) -> None:
    rows = rows_of(report(lines))
    assert list(rows) == [
        "matmul_backward_weight qkv", "adamw_update", "matmul_forward qkv", "bias_backward",
        "encoder_forward", "NCCL", "outside any launcher", "copies and fills"]
    product = rows["matmul_forward qkv"]
    assert product["calls"] == 2, "a captured range counts once a launch of its graph"
    assert product["ms"] == pytest.approx(400e-6) and product["share"] == pytest.approx(400 / 3000)
    assert product["gb_per_s"] == pytest.approx(4200 / 200)
    assert product["tflop_per_s"] == pytest.approx(790000 / 200 / 1e3)
    assert product["of_limit"] == pytest.approx(1 / 200), "1 ns for its bytes and its flops"
    assert rows["matmul_backward_weight qkv"]["of_limit"] == pytest.approx(2 / 300), "bytes rule"
    bias = rows["bias_backward"]
    assert bias["calls"] == 2 and bias["kernels"] == 4
    assert bias["kernel"] == "partial_kernel" and bias["other_kernels"] == 1
    assert sum(row["ms"] for row in rows.values() if row["launcher"] != "copies and fills") == (
        pytest.approx(report(lines)["kernels_ms"] + 100e-6))


def test_adamws_bytes_are_those_of_the_model(lines: list[str]) -> None:
    # gradient 2, m and v 16, master 8, weight 2.
    assert rows_of(report(lines))["adamw_update"]["gb_per_s"] == pytest.approx(28 * 10_000 / 500)


def test_phases_share_kernels_and_gaps(lines: list[str]) -> None:
    phases = report(lines)["phases"]
    assert phases["forward"]["ms"] == pytest.approx(600e-6)
    assert phases["backward"]["ms"] == pytest.approx(900e-6)
    assert phases["update"]["ms"] == pytest.approx(500e-6)
    assert phases["other"]["ms"] == pytest.approx(100e-6)
    assert phases["forward"]["idle_ms"] == pytest.approx(550e-6)
    assert phases["backward"]["idle_ms"] == pytest.approx(100e-6)


def test_kernels_without_a_range_are_told(lines: list[str]) -> None:
    text = profile_step.printed(report(lines))
    assert "1 kernels of a step, 0.000 ms, are outside any launcher (somebody_elses_kernel)" in text
    ranged = [line for line in lines if not line.endswith("\t6")]
    assert "outside" not in profile_step.printed(report(ranged))
    assert "-cg 0" not in text
    # Without the range that they were captured in.
    graphs = [re.sub(r"\t7\t\d+\t(\d+)\t1\t", r"\t7\t0\t\1\t1\t", line) for line in ranged]
    text = profile_step.printed(report(graphs))
    assert "10 kernels of a step" in text and "try -cg 0" in text


def test_records_that_cupti_lost_are_told(lines: list[str]) -> None:
    lost = [line.replace("lost\t0", "lost\t7") for line in lines]
    assert "lost 7 records" in profile_step.printed(report(lost))


@pytest.mark.parametrize(
    "lines, steps, message",
    [
        (RECORDING.read_text().splitlines()[:-1], 1, "no end"),
        (RECORDING.read_text().splitlines(), 3, "2 whole steps were recorded, 3 are wanted"),
    ],
    ids=["cut off", "too short"],
)
def test_a_recording_that_will_not_do_is_refused(
    lines: list[str], steps: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        report(lines, steps)


@pytest.mark.parametrize(
    "name, short",
    [
        ("void llmc::adamw_kernel<float, float>(llmc::Segment<float> const*, int)", "adamw_kernel"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm>(P::Params)",
         "cutlass_80_tensorop_s16816gemm"),
        ("k" * 60, "k" * 20 + "..." + "k" * 21),
    ],
)
def test_kernel_names_are_shortened(name: str, short: str) -> None:
    assert profile_step.short_name(name) == short


TRAINER = f"""#!/bin/sh
[ "$1" = --version ] && echo "train_gpt2 0.1" && exit
echo '| precision | BF16, gradients BF16 |'
echo '| model | 2 layers, 64 channels, 4 heads, vocabulary 50257 in 50304 |'
echo '| parameters | 10000 |'
echo '| processes | 1, ZeRO stage 0 |'
for step in 1 2 3 4 5 6; do echo "step $step/6 | loss 1.0 | norm 1.0 | lr 1.0 | 2.50 ms | x"; done
echo "$*" >"$0.flags"
[ -z "$LLMC_PROFILE" ] || cp {RECORDING} "$LLMC_PROFILE"
"""


def test_the_trainers_flags_follow_and_the_report_is_written(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    tokens = write_random_tokens(tmp_path / "x.bin", 100)
    result = subprocess.run(
        [sys.executable, "dev/bench/profile_step.py", "--trainer", str(trainer), "--library",
         str(trainer), "--data", str(tokens), "--json", str(tmp_path / "report.json"), "-b", "4",
         "-ge", "-1", "--steps", "2", "--warmup", "4"],
        cwd=REPO_ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    flags = (tmp_path / "trainer.flags").read_text().split()
    assert flags[flags.index("-b") + 1] == "4" and flags.count("-b") == 1
    assert flags[flags.index("-ge") + 1] == "-1" and flags[flags.index("-x") + 1] == "6"
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["profile"]["plain_ms"] == 2.5 and record["trainer"] == "train_gpt2 0.1"
    assert rows_of(record["profile"])["adamw_update"]["calls"] == 1


# ---------------------------------------------------------------------------------- the library


def make_library(build: Path, *arguments: str) -> subprocess.CompletedProcess:
    return make("REPORT=0", f"BUILD={build}", *arguments, str(build / "profile" / "libprofile.so"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("build")
    result = make_library(build)
    if "not found" in result.stderr:
        pytest.skip("no CUDA toolkit with CUPTI")
    assert result.returncode == 0, result.stderr
    return build / "profile" / "libprofile.so"


PROGRAM = """
#include "llmc/nvtx_range.cuh"
int main() {
    const llmc::ProfileRange phase("forward");
    const llmc::LauncherRange range("matmul_forward", {{"rows", 2}, {"C", 3}, {"OC", 4}}, 52,
                                    llmc::product_flops(2, 3, 4));
}
"""


def test_the_library_writes_the_ranges_that_the_launchers_name(
    library: Path, tmp_path: Path
) -> None:
    source, program, file = (tmp_path / name for name in ("ranges.cpp", "ranges", "ranges.tsv"))
    source.write_text(PROGRAM)
    nvcc = re.search(r"nvcc \((.*)/bin/nvcc\)", make("check-deps").stdout)
    include = Path(nvcc[1] if nvcc else "/usr/local/cuda") / "include"
    subprocess.run([shutil.which("g++") or "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror",
                    f"-I{REPO_ROOT}", "-isystem", str(include), str(source), "-o", str(program),
                    "-ldl"], check=True)
    env = {**os.environ, "NVTX_INJECTION64_PATH": str(library), "LLMC_PROFILE": str(file)}
    subprocess.run([str(program)], env=env, check=True, timeout=60)
    recording = profile_step.read_recording(file.read_text().splitlines())
    assert recording.texts == {
        1: "forward", 2: "launcher matmul_forward rows=2 C=3 OC=4 bytes=52 flops=48"}
    assert recording.parents == {1: 0, 2: 1}


def test_cupti_that_is_not_there_is_one_line(library: Path, tmp_path: Path) -> None:
    result = make_library(tmp_path / "build", f"CUPTI_PATH={tmp_path}")
    (line,) = result.stderr.splitlines()
    assert f"CUPTI: not found in CUPTI_PATH={tmp_path}" in line and "nvidia-cuda-cupti" in line
