#!/usr/bin/env python3
"""The reproducibility contract on real GPUs and real NCCL: the same bits on every number of GPUs,
whatever disturbs them; memory under ZeRO-1; and what happens when ranks are too many or die.

    python3 test/test_many_gpus.py [--only TEXT] [--build-dir build] [--backend cpu] [--list]
                                   [--shared]

Plain Python, without pytest, for machines that have none. `make test_gpu` runs it through
dev/run_tests.py, like a GoogleTest program: --gtest_output=xml:FILE names the report. What the
machine lacks is skipped with a line that says so. --backend cpu runs what a CPU can, on a small
model. --shared: 2, 4 and 8 ranks on as few GPUs as there are, one is enough. NCCL allows that for
ranks of different hosts, which NCCL_HOSTID makes of them, and lets them talk through sockets: all
but speed and NVLink can be seen so. It needs builds with SWITCHES=1, whose ranks take LLMC_HOST for
their host. LLMC_TEST_DATA names a token file to train on (default: random tokens).
"""

from __future__ import annotations

import argparse
import array
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "dev" / "bench"))

from ranks import Ended, Job, JobError, count_gpus, plan_row, run_job  # noqa: E402

SIZES = (2, 4, 8)
TIME_LIMIT_S = 120  # for one job
KILL_LIMIT_S = 10  # from a rank's death to the others' end
PARAMETERS = 124475904  # of d12, padding rows of wte included
STATE_BYTES = 12  # a parameter: m, v and master weights in fp32
# Name: folders that may hold the build, the first that exists counts; how to make it.
BUILDS = {
    "bf16-cudnn": (["cuda-bf16-cudnn"], "PRECISION=BF16"),
    "bf16-own": (["cuda-bf16"], "PRECISION=BF16 USE_CUDNN=0"),
    "fp32": (["cuda-fp32"], "PRECISION=FP32"),
    "switches": (["cuda-bf16-cudnn-switches", "cuda-bf16-switches"], "PRECISION=BF16 SWITCHES=1"),
}
SHARED_BUILDS = {
    name: ([f"{folder}-switches" for folder in folders], f"{how} SWITCHES=1")
    for name, (folders, how) in BUILDS.items() if name != "switches"
} | {"switches": BUILDS["switches"]}
CPU_BUILDS = {
    "bf16-own": (["cpu-bf16"], "PRECISION=BF16"),
    "fp32": (["cpu-fp32"], "PRECISION=FP32"),
    "switches": (["cpu-bf16-switches"], "PRECISION=BF16 SWITCHES=1"),
}

# Takes the memory of all GPUs but for some, says so, and keeps it; libcuda.so.1 is the driver's.
HOLDER = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    status = getattr(cuda, name)(*args)
    if status: sys.exit(f"{name}: error {status}")
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
for device in range(count.value):
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    take = free.value - int(sys.argv[1])
    if take <= 0: sys.exit(f"GPU {device} has only {free.value} bytes free")
    call("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(take))
    print(f"GPU {device}: {take >> 20} of {total.value >> 20} MiB held", flush=True)
print("holding", flush=True)
time.sleep(600)
"""


def write_tokens(path: Path) -> Path:
    """2^20 tokens that fall as in text (Zipf's law), without numpy, which may not be there."""
    vocabulary, count = 50257, 1 << 20
    weights = [1 / (rank + 1) for rank in range(vocabulary)]
    tokens = random.Random(1).choices(range(vocabulary), weights, k=count)
    header = array.array("i", [20240520, 1, count] + [0] * 253)
    path.write_bytes(header.tobytes() + array.array("H", tokens).tobytes())
    return path


class Failed(Exception):
    """A check that did not hold."""


class Lacking(Exception):
    """Something that this machine does not have."""


def require(holds: object, text: str) -> None:
    if not holds:
        raise Failed(text)


@dataclass(frozen=True)
class Bits:
    """All that must not depend on the number of GPUs."""

    steps: tuple[tuple[str, str, str], ...]  # number, loss, norm of each step line
    weights: tuple[tuple[str, str], ...]  # after each step, where --check-ranks printed them
    hash: str
    bits: str  # the last loss and norm, hashes of m, v and master weights

    @staticmethod
    def of(run: Ended) -> Bits:
        text = run.stdout
        steps = re.findall(r"^step +(\d+)/\d+ \| loss (\S+).*?\| norm (\S+)", text, re.M)
        weights = re.findall(r"^weights of step (\d+): (\S+) on all ranks", text, re.M)
        hashes = re.findall(r"^hash ([0-9a-f]{16})$", text, re.M)
        bits = re.findall(r"^bits (.+)$", text, re.M)
        require(steps and len(hashes) == 1 and len(bits) == 1, f"no step lines or no hash\n{run}")
        return Bits(tuple(steps), tuple(weights), hashes[0], bits[0])

    def difference(self, other: Bits) -> str:
        """What is not the same, in words; "" when all is."""
        for mine, theirs in zip(self.steps, other.steps):
            if mine != theirs:
                return f"step {mine[0]}: loss, norm {mine[1:]} and {theirs[1:]}"
        for mine, theirs in zip(self.weights, other.weights):
            if mine != theirs:
                return f"weights after step {mine[0]}: {mine[1]} and {theirs[1]}"
        for name in ("steps", "weights", "hash", "bits"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} and {getattr(other, name)}"
        return ""


def losses(run: Ended) -> list[float]:
    return [float(loss) for _, loss, _ in Bits.of(run).steps]


def table_row(run: Ended, category: str, name: str) -> float:
    """MiB of a row of the memory table; 0 when it is not there."""
    found = re.findall(rf"^\| {category} +\| {name} +\| +([\d.]+) \|", run.stdout, re.M)
    return float(found[0]) if found else 0.0


class Lab:
    """Builds, data, and runs of one GPU that others are compared with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cpu = options.backend == "cpu"
        self.shared = options.shared
        self.builds = CPU_BUILDS if self.cpu else SHARED_BUILDS if self.shared else BUILDS
        self.build_dir = Path(options.build_dir).resolve()
        self.devices = 4 if self.cpu else count_gpus()
        self.gpus = SIZES[-1] if self.shared and self.devices > 0 else self.devices
        self.folder = Path(tempfile.mkdtemp(prefix="many_gpus_"))
        self.kept: dict[str, Ended] = {}
        self.records: list[dict] = []  # bits of all trainings that went well
        data = os.environ.get("LLMC_TEST_DATA")
        self.data = data or str(write_tokens(self.folder / "tokens.bin"))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def find(self, build: str) -> Path | None:
        program = "train_gpt2cpu" if self.cpu else "train_gpt2cu"
        for folder in self.builds.get(build, ([], ""))[0]:
            if (self.build_dir / folder / program).exists():
                return self.build_dir / folder / program
        return None

    def has(self, build: str) -> bool:
        return self.find(build) is not None

    def binary(self, build: str) -> Path:
        found = self.find(build)
        if found is None:
            _, how = self.builds[build]
            program = "train_gpt2cpu" if self.cpu else "train_gpt2cu"
            raise Failed(f"the build {build} is not there: make {program} {how}")
        return found

    def main_build(self) -> str:
        """The build that most tests use: bf16, with cuDNN where that is."""
        return "bf16-cudnn" if not self.cpu and self.has("bf16-cudnn") else "bf16-own"

    def args(self, changes: Mapping[str, object] | None = None, check: bool = True) -> list:
        """Ten steps of the model that is compared, with its bits."""
        flags: dict[str, object] = {"-i": self.data, "-e": "d12", "-b": 4, "-t": 1024,
                                    "-d": 32768, "-x": 10, "-v": 0, "-s": 0}
        if self.cpu:
            flags.update({"-e": "custom:L2C32H2T32", "-b": 1, "-t": 32, "-d": 256})
        if self.shared:  # a step takes a second and more
            flags["-x"] = 4
        flags.update(changes or {})
        if self.cpu:  # as many micro-batches as on a GPU
            flags["-b"] = 1
            flags["-d"] = 256
        return [*(part for flag in flags.items() for part in flag), "--hash",
                *(["--check-ranks"] if check else [])]

    def sharing(self, count: int) -> dict[str, object]:
        """What lets `count` ranks start on fewer GPUs."""
        if not self.shared or count == 1:
            return {}
        own = [{"LLMC_HOST": f"host{rank}", "NCCL_HOSTID": f"host{rank}",
                "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
                "CUDA_VISIBLE_DEVICES": str(rank % max(1, self.devices))} for rank in range(count)]
        return {"rank_env": own}

    def run(self, build: str, count: int, way: str, args: Sequence[object],
            timeout: float = TIME_LIMIT_S, **how: object) -> Ended:
        """A training that must go well."""
        run = run_job(self.binary(build), count, way, args, timeout,
                      **{**self.sharing(count), **how})
        require(set(run.statuses) == {0}, f"status {run.statuses}\n{run}")
        self.record(build, count, way, args, run)
        return run

    def record(self, build: str, count: int, way: str, args: Sequence[object],
               run: Ended) -> None:
        bits = Bits.of(run)
        flags = " ".join(map(str, args)).replace(self.data, "tokens.bin")
        self.records.append({"build": build, "gpus": count, "started_by": way or "itself",
                             "flags": flags, "seconds": round(run.seconds, 1),
                             "last_step": bits.steps[-1], "hash": bits.hash, "bits": bits.bits})

    def one(self, build: str, args: Sequence[object]) -> Ended:
        """The run of one GPU."""
        key = repr((build, *map(str, args)))
        if key not in self.kept:
            self.kept[key] = self.run(build, 1, "", args)
        return self.kept[key]

    def prepare(self, runs: Sequence[tuple[str, Sequence[object]]]) -> None:
        """Makes runs of one GPU, as many at once as there are GPUs. Those that fail are made again
        where they are needed, and fail there."""
        waiting = list(runs)
        while waiting:
            jobs = []
            for gpu in range(min(max(1, self.devices), 2 if self.cpu else 8, len(waiting))):
                build, args = waiting.pop(0)
                binary = self.find(build)
                if binary is None:
                    continue
                env = {} if self.cpu else {"CUDA_VISIBLE_DEVICES": str(gpu)}
                jobs.append((build, args, Job(binary, 1, "", args, env=env)))
            for build, args, job in jobs:
                with job:
                    try:
                        run = job.wait(TIME_LIMIT_S)
                    except JobError:
                        continue
                    if run.statuses == [0]:
                        self.kept[repr((build, *map(str, args)))] = run
                        self.record(build, 1, "", args, run)

    def equal(self, build: str, count: int, way: str, args: Sequence[object],
              reference: Ended, **how: object) -> Ended:
        """Runs `count` ranks, which must have the bits of `reference`."""
        run = self.run(build, count, way, args, **how)
        difference = Bits.of(reference).difference(Bits.of(run))
        require(not difference, f"not the bits of one GPU: {difference}\n{reference}\n{run}")
        require("nan" not in str(Bits.of(run).steps), f"a loss or a norm is not a number\n{run}")
        require("bit equality across GPU counts is off" not in run.stdout, f"off\n{run}")
        return run


# ------------------------------------------------------------------------------------- the tests


@dataclass
class Case:
    suite: str
    name: str
    run: Callable[[Lab], None]
    seconds: float = 0.0
    failure: str = ""
    skipped: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.suite}.{self.name}"


@dataclass
class Cases:
    """In the order in which they run: the most important first."""

    all: list[Case] = field(default_factory=list)

    def add(self, suite: str, name: str, run: Callable[[Lab], None]) -> None:
        self.all.append(Case(suite, name, run))


LONG = {"-b": 16, "-x": 200}


def equality(build: str, count: int, zero: int, way: str,
             per_node: int | None = None) -> Callable[[Lab], None]:
    """Also keeps the run, in whose tables later tests look."""

    def test(lab: Lab) -> None:
        args = lab.args({"-z": zero, "-lg": 10})
        run = lab.equal(build, count, way, args, lab.one(build, lab.args()), per_node=per_node)
        require(f"{count}, ZeRO stage {zero}" in run.stdout, f"another ZeRO stage\n{run}")
        if per_node is None:
            lab.kept[f"{build} {count} {zero}"] = run

    return test


# Each has its own attention: for heads of 64 and whole tiles, and what there is for others. With
# cuDNN's backward pass in graphs, the second and the third broke off with an illegal address.
GRAPH_SHAPES: dict[str, dict[str, object]] = {
    "d12": {},
    "HeadsOf32": {"-e": "custom:L4C128H4T64", "-b": 8, "-t": 64, "-d": 4096},
    "HalfATileMore": {"-t": 96, "-d": 3072},
    "HeadsOf128": {"-e": "custom:L2C256H2T128", "-t": 128, "-d": 4096},
}


def without_graphs(build: str, shape: str) -> Callable[[Lab], None]:
    """A micro-step launched kernel by kernel and as a CUDA graph."""

    def test(lab: Lab) -> None:
        flags = GRAPH_SHAPES[shape]
        run = lab.one(build, lab.args(flags))
        lab.equal(build, 1, "", lab.args({**flags, "-cg": 0}), run)
        attention = plan_row(run.stdout, "attention")
        require(attention is not None, f"no row 'attention'\n{run}")
        backward_is_cudnns = "cuDNN" in attention and "backward own" not in attention
        wanted = "0 (1 asked)" if backward_is_cudnns else "1"
        graphs = plan_row(run.stdout, "-cg cuda_graphs")
        require(graphs == wanted, f"-cg is {graphs} in the plan, with attention {attention}")

    return test


def two_hundred_steps(count: int, zero: int) -> Callable[[Lab], None]:
    def test(lab: Lab) -> None:
        build = lab.main_build()
        reference = lab.one(build, lab.args(LONG, check=False))
        lab.equal(build, count, "tcp", lab.args({"-z": zero, **LONG}, check=False), reference)

    return test


def swapped_devices(lab: Lab) -> None:
    """Rank 0 on the second GPU, rank 1 on the first."""
    build = lab.main_build()
    lab.equal(build, 2, "tcp", lab.args({"-z": 1}), lab.one(build, lab.args()),
              env={"CUDA_VISIBLE_DEVICES": "1,0"})


def memory_held(lab: Lab) -> None:
    """No choice depends on free memory: another process holds all but 9 GiB."""
    build = lab.main_build()
    reference = lab.one(build, lab.args())
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(9 << 30)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or lines[-1] != "holding\n":
            lines.append(holder.stdout.readline())
            if not lines[-1]:
                raise Lacking(f"the memory could not be held: {holder.stderr.read().strip()}")
        lab.equal(build, 2, "tcp", lab.args({"-z": 1}), reference)
        require(holder.poll() is None, "the holder ended early")
    finally:
        holder.kill()
        holder.communicate()


def delays(zero: int, *names: str) -> Callable[[Lab], None]:
    """Only events order the streams: whichever is late, the result is the same."""

    def test(lab: Lab) -> None:
        lab.binary("switches")
        build = lab.main_build()
        env = {f"LLMC_DELAY_{name}_US": "3000" for name in names}
        lab.equal("switches", 2, "tcp", lab.args({"-z": zero}), lab.one(build, lab.args()), env=env)

    return test


def caught(fault: str, zero: int, delay: str) -> Callable[[Lab], None]:
    """The delays can show a wait that is missing."""

    def test(lab: Lab) -> None:
        args = [arg for arg in lab.args({"-z": zero, "-x": 3}) if arg != "--check-ranks"]
        env = {"LLMC_FAULT": fault, delay: "3000"}
        run = lab.run("switches", 2, "tcp", args, env=env)
        reference = lab.one("switches", [*lab.args({"-x": 3}, check=False)])
        same = Bits.of(reference).difference(Bits.of(run)) == ""
        require(not same, f"{fault} changed nothing: the delay shows nothing\n{run}")

    return test


def plain_path(zero: int) -> Callable[[Lab], None]:
    """-rw 1: NCCL's own order. Equality is off, which it says; the losses agree."""

    def test(lab: Lab) -> None:
        build = lab.main_build()
        changes = {"-u": 10}
        reference = losses(lab.one(build, lab.args(changes)))
        run = lab.run(build, 2, "tcp", lab.args({"-z": zero, "-rw": 1, **changes}))
        require("bit equality across GPU counts is off" in run.stdout, f"does not say so\n{run}")
        worst = max(abs(a - b) for a, b in zip(reference, losses(run)))
        require(worst <= 1e-2, f"losses differ by {worst:.6f}\n{reference}\n{run}")

    return test


def memory_table(lab: Lab) -> None:
    """ZeRO-1 halves the optimizer's 12 bytes a parameter, as the table says."""
    runs = [lab.kept.get(f"{lab.main_build()} 2 {zero}") for zero in (0, 1)]
    if None in runs:
        raise Failed("the runs of two GPUs that this looks at did not go well")
    for name in ("m", "v", "master weights"):
        whole, half = (table_row(run, "optimizer", name) for run in runs)
        require(whole > 0 and abs(half / whole - 0.5) < 0.01,
                f"{name}: {whole} MiB with ZeRO-0, {half} MiB with ZeRO-1")


def driver_memory(lab: Lab) -> None:
    """And as the driver says of the GPU of rank 0: d12 saves 712 MiB on two GPUs."""
    used = []
    for zero in (0, 1):
        run = lab.kept.get(f"{lab.main_build()} 2 {zero}")
        if run is None:
            raise Failed("the runs of two GPUs that this looks at did not go well")
        found = re.findall(r"^step 10: GPU memory (\d+) of \d+ MiB", run.stdout, re.M)
        require(found, f"no line on the GPU's memory\n{run}")
        used.append(int(found[0]))
    expected = PARAMETERS * STATE_BYTES / 2 / (1 << 20)
    saved = used[0] - used[1]
    require(abs(saved - expected) < 0.15 * expected,
            f"ZeRO-0 {used[0]} MiB, ZeRO-1 {used[1]} MiB: {saved} saved, not about {expected:.0f}")


def assert_refused(run: Ended, *needles: str) -> None:
    """All end with status 1, with a line each at most; one of them says why."""
    require(set(run.statuses) == {1}, f"status {run.statuses}, not 1\n{run}")
    lines = [text.splitlines() for text in run.errors]
    require(all(len(each) <= 1 for each in lines), f"more than a line\n{run}")
    said = any(all(needle in line for needle in needles) for each in lines for line in each)
    require(said, f"no line with {needles}\n{run}")


def too_many_ranks(lab: Lab) -> None:
    count = lab.gpus + 1
    args = lab.args({"-d": 4 * 1024 * count, "-x": 1})
    run = run_job(lab.binary(lab.main_build()), count, "tcp", args, 60)
    assert_refused(run, f"{lab.gpus} GPUs", f"{count} ranks")


def two_on_one_gpu(lab: Lab) -> None:
    run = run_job(lab.binary(lab.main_build()), 2, "tcp", lab.args({"-x": 1}), 60,
                  env={"CUDA_VISIBLE_DEVICES": "0"})
    assert_refused(run, "use the same GPU")


def killed(victim: int, zero: int) -> Callable[[Lab], None]:
    """kill -9 in mid-step: the others end within seconds and name the rank."""

    def test(lab: Lab) -> None:
        count = 4 if lab.gpus >= 4 else 2
        args = lab.args({"-z": zero, "-x": 100000}, check=False)
        with Job(lab.binary(lab.main_build()), count, "tcp", args, **lab.sharing(count)) as job:
            job.wait_for("\nstep    3/", 60)
            job.processes[victim % count].kill()
            begin = time.monotonic()
            run = job.wait(KILL_LIMIT_S)
            seconds = time.monotonic() - begin
        require(seconds < KILL_LIMIT_S, f"took {seconds:.1f} s")
        for rank in range(count):
            if rank == victim % count:
                continue
            require(run.statuses[rank] > 0, f"rank {rank} ended with {run.statuses[rank]}\n{run}")
            named = f"rank {victim % count} " in run.errors[rank]
            require(named, f"rank {rank} does not name rank {victim % count}\n{run}")

    return test


def racecheck(lab: Lab) -> None:
    """compute-sanitizer's racecheck over a small model on two GPUs. It does not follow the
    asynchronous barriers of the libraries' kernels: a hazard counts where it names one of ours."""
    args = ["-i", lab.data, "-e", "custom:L2C64H2T64", "-b", 2, "-t", 64, "-d", 512, "-x", 2,
            "-v", 0, "-s", 0, "-z", 1]
    run = run_job(lab.binary("bf16-own"), 2, "mpi", args, 240,
                  prefix=[str(sanitizer()), "--tool", "racecheck"])
    require(set(run.statuses) == {0}, f"status {run.statuses}\n{run}")
    for rank, text in enumerate(run.outputs):
        require("RACECHECK SUMMARY" in text, f"rank {rank}: no summary\n{run}")
        require("Internal Sanitizer Error" not in text, f"rank {rank}: the tool failed\n{run}")
        library = re.compile(r"access at [^ ]*(nvjet|cublas|cutlass|nccl)", re.IGNORECASE)
        hazards = [line for line in text.splitlines()
                   if "access at" in line and not library.search(line)]
        require(not hazards, "\n".join([f"rank {rank}: hazards", *hazards[:10]]))


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin")


def machine_cases(lab: Lab, cases: Cases) -> None:
    """What the machine lacks is one skipped test each; the tests that need it are then left out."""

    def has(name: str, there: object, lack: str) -> None:
        def test(_: Lab) -> None:
            if not there:
                raise Lacking(lack)

        cases.add("Machine", name, test)

    if lab.shared:
        has("HasAGpu", lab.devices > 0, "no GPU here")
    for count in () if lab.shared else SIZES:
        has(f"Has{count}Gpus", lab.gpus >= count, f"{lab.gpus} GPUs here")
    has("HasMpirun", shutil.which("mpirun"), "no mpirun: -pi mpi is not tried")
    if not lab.cpu:
        has("HasCuDnn", lab.has("bf16-cudnn"), "no build with cuDNN")
        if not lab.shared:
            has("HasComputeSanitizer", sanitizer(), "no compute-sanitizer: no racecheck")


def collect(lab: Lab) -> Cases:
    cases = Cases()
    machine_cases(lab, cases)
    builds = ["bf16-own", "fp32"]
    if not lab.cpu and lab.has("bf16-cudnn"):
        builds.insert(0, "bf16-cudnn")
    if lab.shared:  # the one that gpu_check.sh makes, and what else is there
        builds = [build for build in builds if lab.has(build)] or builds[:1]
    ways = ["mpi", "fs"] if shutil.which("mpirun") else ["fs"]
    counts = [count for count in SIZES if lab.gpus >= count]

    def same_bits(counts: Sequence[int], *ways: str) -> None:
        for count in counts:
            for build in builds:
                for zero in (1, 0):
                    for way in ways:
                        cases.add("SameBits", f"{build}/N{count}/z{zero}/{way}",
                                  equality(build, count, zero, way))

    same_bits(counts, "tcp")
    if lab.shared:  # gradients are added up inside the nodes first, then across them
        for count, per_node in ((4, 2), (8, 2), (8, 4)):
            for zero in (1, 0):
                if count in counts:
                    cases.add("Nodes", f"{builds[0]}/N{count}/{per_node}OfANode/z{zero}",
                              equality(builds[0], count, zero, "tcp", per_node))
    alone = not lab.cpu and not lab.shared  # a rank has its GPU to itself
    if lab.gpus >= 1 and alone:
        for build in builds:
            for shape in GRAPH_SHAPES:
                cases.add("Graphs", f"SameBitsAsKernelByKernel/{build}/{shape}",
                          without_graphs(build, shape))
    if counts:
        cases.add("Memory", "TableHalvesTheOptimizer", memory_table)
        if alone:
            cases.add("Memory", "DriverSeesHalfTheOptimizer", driver_memory)
        cases.add("Killed", "LastRank", killed(-1, 1))
        cases.add("Killed", "RankZero", killed(0, 0))
        if not lab.shared:
            cases.add("SameBits", "TwoHundredSteps", two_hundred_steps(2, 1))
        for zero, names in ((0, ["NCCL"]), (1, ["MAIN"]), (1, ["MAIN", "NCCL"])):
            cases.add("Delays", f"{'And'.join(names)}/z{zero}", delays(zero, *names))
        cases.add("Delays", "ShowAReductionThatStartsEarly",
                  caught("early_reduce", 1, "LLMC_DELAY_MAIN_US"))
        if alone:
            cases.add("SameBits", "SwappedDevices", swapped_devices)
            cases.add("SameBits", "MemoryHeldByAnother", memory_held)
        for zero in (1, 0):
            cases.add("PlainPath", f"AgreesWithinAHundredth/z{zero}", plain_path(zero))
    if lab.gpus >= 1 and alone:
        cases.add("Refused", "MoreRanksThanGpus", too_many_ranks)
        cases.add("Refused", "TwoRanksOnOneGpu", two_on_one_gpu)
    same_bits(counts[:1] if lab.shared else counts, *ways)
    if counts and alone and sanitizer() and "mpi" in ways:
        cases.add("Racecheck", "TwoGpus", racecheck)
    return cases


def prepare(lab: Lab, wanted: Sequence[Case]) -> None:
    """The runs of one GPU that the tests need, side by side."""
    runs: list[tuple[str, list]] = []
    suites = {case.suite for case in wanted}
    if suites & {"SameBits", "Nodes", "Delays", "Graphs"} and lab.gpus >= 1:
        if any(case.name == "TwoHundredSteps" for case in wanted):
            runs.append((lab.main_build(), lab.args(LONG, check=False)))
        runs += [(build, lab.args()) for build in BUILDS if build != "switches"]
    if "PlainPath" in suites and lab.gpus >= 2:
        runs.append((lab.main_build(), lab.args({"-u": 10})))
    lab.prepare(runs)


def run_case(case: Case, lab: Lab) -> None:
    begin = time.monotonic()
    try:
        case.run(lab)
    except Lacking as lacking:
        case.skipped = str(lacking)
    except (Failed, JobError, OSError) as failed:
        case.failure = str(failed)
    case.seconds = time.monotonic() - begin
    word = "SKIPPED" if case.skipped else "FAILED" if case.failure else "ok"
    reason = f": {case.skipped}" if case.skipped else ""
    print(f"{word:8}{case.full_name} ({case.seconds:.1f} s){reason}", flush=True)
    if case.failure:
        print(case.failure, flush=True)


def write_report(path: Path, cases: Sequence[Case]) -> None:
    """As GoogleTest writes it, for dev/run_tests.py."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="many_gpus")
    for case in cases:
        entry = ElementTree.SubElement(suite, "testcase", classname=case.suite, name=case.name,
                                       time=f"{case.seconds:.3f}")
        if case.skipped:
            ElementTree.SubElement(entry, "skipped", message=case.skipped)
        if case.failure:
            clean = re.sub(r"[^\t\n\x20-\ufffd]", "?", case.failure)
            ElementTree.SubElement(entry, "failure", message=clean.splitlines()[0]).text = clean
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(path, encoding="utf-8")


def write_json(path: Path, lab: Lab, cases: Sequence[Case]) -> None:
    """For dev/bench/results/."""
    gpu = subprocess.run(["sh", "-c", "nvidia-smi --query-gpu=name,driver_version "
                          "--format=csv,noheader | head -n 1"], capture_output=True, text=True)
    trainer = subprocess.run([str(lab.binary(lab.main_build())), "--version"],
                             capture_output=True, text=True)
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    results = [{"name": case.full_name, "seconds": round(case.seconds, 1),
                "result": "skipped" if case.skipped else "failed" if case.failure else "ok",
                "why": case.skipped or case.failure[:500]} for case in cases]
    record = {
        "date": time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime()),
        "gpu": gpu.stdout.strip() or "none",
        "gpus": lab.devices,
        "shared": lab.shared,
        "trainer": trainer.stdout.strip(),
        "environment": nccl,
        "cases": results,
        "trainings": lab.records,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tests whose names hold this")
    parser.add_argument("--list", action="store_true", help="names of the tests, in their order")
    parser.add_argument("--backend", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--shared", action="store_true", help="several ranks on each GPU")
    parser.add_argument("--build-dir", default=os.environ.get("LLMC_BUILD_DIR", ROOT / "build"))
    parser.add_argument("--gtest_output", default="", metavar="xml:FILE", help="report")
    parser.add_argument("--json", type=Path, help="results with the bits of each training")
    parser.add_argument("--gtest_brief", help=argparse.SUPPRESS)  # dev/run_tests.py gives it
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    # As Ctrl-C: the ranks of the present test end as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    lab = Lab(options)
    done: list[Case] = []
    try:
        cases = [t for t in collect(lab).all if options.only.lower() in t.full_name.lower()]
        if options.list:
            print("\n".join(case.full_name for case in cases))
            return
        prepare(lab, cases)
        for case in cases:
            run_case(case, lab)
            done.append(case)
    finally:
        lab.close()
        if options.json and done:
            write_json(options.json, lab, done)
    if options.gtest_output:
        write_report(Path(options.gtest_output.removeprefix("xml:")), cases)
    failed = [case.full_name for case in cases if case.failure]
    skipped = [case for case in cases if case.skipped]
    print(f"{len(cases) - len(failed) - len(skipped)} passed, {len(failed)} failed, "
          f"{len(skipped)} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
