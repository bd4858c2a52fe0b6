"""The CUDA build, as far as it goes without a GPU: what make would do, and what the program says.

The second part needs build/cuda-*/train_gpt2cu (make train_gpt2cu; .ci/run builds three of them
where there is nvcc); without one it is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import REPO_ROOT, SHAPE, Trainer, Workplace, assert_refused, snapshot
from test_build import install, make

# ----------------------------------------------------------------------------------------- make

KERNELS = sorted(path.name for path in (REPO_ROOT / "llmc").glob("kernels_*.cu"))
SOME_KERNELS = "llmc/kernels_layernorm.cu"


@pytest.fixture
def toolkit(tmp_path: Path) -> list[str]:
    """Make variables for a CUDA toolkit with cuDNN and its front-end, none of which is real."""
    install(tmp_path, "cublasLt.h", "cublasLt")
    install(tmp_path, "cudnn.h", "cudnn")
    install(tmp_path, "cudnn_frontend.h", "cudnn_frontend")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch()
    paths = [f"{name}={tmp_path}" for name in ("CUDA_HOME", "CUDNN_PATH", "CUDNN_FRONTEND_PATH")]
    return ["-n", "-B", "REPORT=0", "GPU_ARCH=90", "USE_CUDNN=", *paths]


def compile_line(arguments: list[str], source: str = "train_gpt2.cu") -> str:
    """The line by which make would compile a file."""
    result = make(*arguments, "train_gpt2cu")
    assert result.returncode == 0, result.stderr
    (line,) = re.findall(rf"^\S+/nvcc .* {re.escape(source)} .*$", result.stdout, re.MULTILINE)
    return line


def link_line(arguments: list[str]) -> str:
    """The line by which make would link the trainer."""
    result = make(*arguments, "train_gpt2cu")
    assert result.returncode == 0, result.stderr
    (line,) = re.findall(r"^\S+/nvcc .* -o \S+/train_gpt2cu .*$", result.stdout, re.MULTILINE)
    return line


def refusal(arguments: list[str]) -> str:
    """The one line with which make stops."""
    result = make(*arguments, "train_gpt2cu")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    return line


def test_cudnn_is_used_where_it_and_its_front_end_are_found(
    toolkit: list[str], tmp_path: Path
) -> None:
    with_cudnn = compile_line(toolkit)
    assert "-DLLMC_CUDNN" in with_cudnn
    link = compile_line(toolkit, "-o build/cuda-bf16-cudnn/train_gpt2cu")
    assert "train_gpt2.o" in link and "cudnn_att.o" in link
    assert "-DLLMC_CUDNN" in compile_line(toolkit, SOME_KERNELS)
    assert f"-rpath,{tmp_path}/lib" in link, "cuDNN is opened at run time"
    for without, folder in ((["USE_CUDNN=0"], "cuda-bf16"), (["PRECISION=FP32"], "cuda-fp32")):
        assert "LLMC_CUDNN" not in compile_line([*toolkit, *without]), without
        link = compile_line([*toolkit, *without], f"-o build/{folder}/train_gpt2cu")
        assert "cudnn_att.o" not in link, without
    (tmp_path / "include" / "cudnn_frontend.h").unlink()
    assert "LLMC_CUDNN" not in compile_line(toolkit)


def test_cudnn_that_cannot_be_had_is_one_line(toolkit: list[str], tmp_path: Path) -> None:
    line = refusal([*toolkit, "USE_CUDNN=1", "PRECISION=FP32"])
    assert "USE_CUDNN=1" in line and "PRECISION=BF16" in line
    (tmp_path / "include" / "cudnn_frontend.h").unlink()
    assert "cuDNN front-end: not found" in refusal([*toolkit, "USE_CUDNN=1"])
    (tmp_path / "include" / "cudnn.h").unlink()
    assert "cuDNN: not found" in refusal([*toolkit, "USE_CUDNN=1"])


def test_cudnns_object_does_not_depend_on_how_the_rest_is_built(toolkit: list[str]) -> None:
    lines = {
        compile_line([*toolkit, *more], "llmc/cudnn_att.cpp")
        for more in ([], ["GRAD_PRECISION=FP32"], ["GPU_ARCH=80 90"], ["NO_USE_MPI="])
    }
    assert len(lines) == 1 and "-O1" in lines.pop()


def test_the_trainers_own_code_is_compiled_beside_the_kernels(toolkit: list[str]) -> None:
    """It is C++, the same for every GPU, and waits for no object of theirs."""
    lines = {compile_line([*toolkit, f"GPU_ARCH={arch}"]) for arch in ("90", "80 90")}
    assert len(lines) == 1 and "-x c++" in lines.pop()
    link = compile_line(toolkit, "-o build/cuda-bf16-cudnn/train_gpt2cu")
    assert len(KERNELS) > 1
    for name in KERNELS:
        line = compile_line([*toolkit, "GPU_ARCH=80 90"], f"llmc/{name}")
        assert re.findall(r"code=sm_(\d+)", line) == ["80", "90"]
        assert f"/{Path(name).stem}.o " in link


@pytest.mark.parametrize("jobs", ["", "-j1", "-j3"])
def test_objects_are_compiled_side_by_side_unless_the_user_says_how(
    toolkit: list[str], jobs: str
) -> None:
    """One job for each core, from a make of its own; -j of the user's is left alone."""
    result = make(*toolkit, *filter(None, [jobs]), "train_gpt2cu", "gpu_tests")
    assert result.returncode == 0, result.stderr
    inner = re.findall(r"^make .* -j(\d+) ", result.stdout, re.MULTILINE)
    cores = subprocess.check_output(["nproc"], text=True).strip()
    assert inner == ([] if jobs else [cores] * 2)
    if jobs:  # one graph: no object is compiled twice at the same time
        lines = re.findall(rf"^\S+/nvcc .* {SOME_KERNELS} ", result.stdout, re.MULTILINE)
        assert len(lines) == 1


def test_every_header_of_kernels_is_in_one_object() -> None:
    """A launcher in no object, or in two, would not link."""
    folder = REPO_ROOT / "llmc"
    included = re.findall(r"^#include \"(llmc/\w+\.cuh)\"$",
                          "".join((folder / name).read_text() for name in KERNELS), re.MULTILINE)
    with_launchers = [f"llmc/{path.name}" for path in folder.glob("*.cuh")
                      if re.search(r"^LLMC_LAUNCHER ", path.read_text(), re.MULTILINE)]
    assert sorted(included) == sorted(with_launchers)
    single = re.findall(r"^#include \"(llmc/\w+\.cuh)\"$",
                        (folder / "launchers.h").read_text(), re.MULTILINE)
    assert sorted(single) == sorted(with_launchers)


@pytest.mark.parametrize("arch", ["70", "75", "90 75"])
def test_bf16_for_a_gpu_that_has_none_is_one_line(toolkit: list[str], arch: str) -> None:
    line = refusal([*toolkit, f"GPU_ARCH={arch}"])
    assert f"sm_{arch.split()[-1]}" in line and "PRECISION=FP32" in line
    assert f"sm_{arch.split()[-1]}" in compile_line(
        [*toolkit, f"GPU_ARCH={arch}", "PRECISION=FP32"], SOME_KERNELS)


@pytest.mark.parametrize(
    "answer, expected",
    [("exit 1", ["80", "90a"]), ("printf '9.0\\n9.0\\n'", ["90a"]), ("echo 8.6", ["86"]),
     ("echo NVIDIA-SMI has failed because ...; exit 9", ["80", "90a"])],
    ids=["no GPU", "two of a kind", "another", "no driver"],
)
def test_the_gpu_at_hand_decides_what_is_compiled_for(
    toolkit: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str,
    expected: list[str],
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    line = compile_line([*toolkit, "GPU_ARCH="], SOME_KERNELS)
    assert re.findall(r"code=sm_(\d+a?)", line) == expected


def test_an_architecture_with_a_dot_is_the_one_without(toolkit: list[str]) -> None:
    line = compile_line([*toolkit, "GPU_ARCH=9.0"], SOME_KERNELS)
    assert "arch=compute_90a,code=sm_90a" in line


NVCC = shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")


def compile_hopper(folder: Path, arch: str, *more: str) -> subprocess.CompletedProcess[str]:
    """nvcc, with the backward pass that is for Hopper."""
    source = folder / "hopper.cu"
    source.write_text('#include "llmc/attention_hopper.cuh"\n'
                      "auto* use = &llmc::attention_hopper::backward<llmc::bf16>;\n")
    command = [str(NVCC), "-std=c++17", f"-I{REPO_ROOT}", "-DLLMC_BF16", f"-arch=sm_{arch}",
               "-cubin", *more, "-o", str(folder / "hopper.cubin"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("arch", ["80", "100"])
def test_kernels_for_hopper_compile_for_gpus_before_and_after_it(tmp_path: Path, arch: str) -> None:
    """Those with wgmma have no body there."""
    result = compile_hopper(tmp_path, arch)
    assert not result.stderr, result.stderr


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_ptxas_lets_products_of_hopper_run_beside_the_rest(tmp_path: Path) -> None:
    """C7510 to C7519 say that it puts them one after the other; nothing fails but the speed."""
    result = compile_hopper(tmp_path, "90a", "-Xptxas", "-v")
    assert result.stderr.count("bytes spill stores") == 2, result.stderr
    assert result.stderr.count(" 0 bytes spill stores") == 2, result.stderr
    assert "(C75" not in result.stderr, result.stderr


def test_a_tree_without_history_can_be_told_its_commit(toolkit: list[str]) -> None:
    assert '"0123456789ab"' in compile_line([*toolkit, "COMMIT=0123456789ab"])


def test_a_new_commit_compiles_no_kernel_again(toolkit: list[str]) -> None:
    changes = ["COMMIT=0123456789ab", "COMMIT=ba9876543210"]
    assert len({compile_line([*toolkit, change], SOME_KERNELS) for change in changes}) == 1
    assert len({compile_line([*toolkit, change]) for change in changes}) == 2


# ---------------------------------------------------------------------------------- the program


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cuda" not in metafunc.fixturenames:
        return
    folder = Path(metafunc.config.getoption("--build-dir")).resolve()
    found = sorted(folder.glob("cuda-*/train_gpt2cu"))
    names = [path.parent.name for path in found]
    metafunc.parametrize("cuda", found or [None], ids=names or ["none"], indirect=True)


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Trainer:
    """Each CUDA trainer that was built."""
    if request.param is None:
        pytest.skip("no build/cuda-*/train_gpt2cu")
    precision = "fp32" if "fp32" in request.param.parent.name.split("-") else "bf16"
    return Trainer(request.param, precision)


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_help_and_version_need_no_gpu(cuda: Trainer) -> None:
    assert "Examples" in cuda.train(["--help"], env=NO_GPU).stdout
    (line,) = cuda.train(["--version"], env=NO_GPU).stdout.splitlines()
    assert f"precision {cuda.precision.upper()}" in line
    assert ("FP32 gradients" in line) == ("gradfp32" in cuda.binary.parent.name)


def test_bad_input_needs_no_gpu(cuda: Trainer, work: Workplace) -> None:
    too_long = SHAPE.max_seq_len + 1
    for flags, needle in (({"-b": 0}, "-b 0"), ({"-t": too_long}, f"-t {too_long}"),
                          ({"-i": "missing.bin"}, "missing.bin")):
        assert_refused(cuda.run(work.args({**flags, "-d": None}), env=NO_GPU), needle)


def test_without_a_gpu_it_says_so_and_writes_nothing(cuda: Trainer, work: Workplace) -> None:
    before = snapshot(work.folder)
    result = cuda.run(work.args({"-o": work.out}), env=NO_GPU)
    assert_refused(result, "no GPU", "train_gpt2cpu")
    assert snapshot(work.folder) == before
