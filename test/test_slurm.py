"""The scripts in scripts/, and a real Slurm of two nodes on this machine for those in multi_node/.

A run's settings come from the environment, and its result is compared with that of one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest

from helpers import (
    REPO_ROOT,
    SHAPE,
    Result,
    Trainer,
    Workplace,
    checkpoints,
    random_weights,
    snapshot,
    write_model,
    write_tokens,
)
from many_ranks import switches_binary
from slurm_cluster import Job, SlurmCluster, why_not

SCRIPTS = REPO_ROOT / "scripts"
MULTI_NODE = SCRIPTS / "multi_node"
SIZES = {
    "run_gpt2_124M.sh": 124475904,
    "run_gpt2_350M.sh": 354871296,
    "run_gpt2_774M.sh": 774090240,
    "run_gpt2_1558M.sh": 1557686400,
    "run_gpt3_125M.sh": 125262336,
}
MPI = {  # for mpirun as root, with more processes than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Its two nodes have one address, which it would take for two hosts that meet no network.
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}
SLOW = {"LLMC_DELAY_HOST_US": "200000"}  # a step of a build with switches takes as long
NO_SLURM = why_not()
needs_slurm = pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(running_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """With an empty queue."""
    yield running_cluster
    running_cluster.cancel_jobs()


@pytest.fixture(scope="module")
def slow(pytestconfig: pytest.Config) -> Trainer:
    """For runs that are to be stopped or killed in time, with SLOW."""
    return switches_binary(pytestconfig)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, fp32: Trainer) -> Result:
    """The run of settings() by one process, without any script."""
    return run_alone(Workplace(tmp_path_factory.mktemp("alone")), fp32)


@pytest.fixture(scope="module")
def slow_alone(tmp_path_factory: pytest.TempPathFactory, slow: Trainer) -> Result:
    return run_alone(Workplace(tmp_path_factory.mktemp("slow_alone")), slow)


def run_alone(work: Workplace, trainer: Trainer) -> Result:
    env = settings(work, trainer)
    batch = {"-b": 2, "-t": 16, "-d": 256, "-rw": 8}
    rates = {"-k": "cosine", "-l": 1e-3, "-u": 5, "-q": 0.1, "-c": 0.1}
    flags = {"-e": env["MODEL"], **batch, **rates, "-x": 24, "-v": 12, "-m": 4}
    return trainer.train(work.args(flags, "--hash"))


def settings(work: Workplace, trainer: Trainer, **changes: object) -> dict[str, str]:
    """A small run's settings, as variables of the environment."""
    model = work.folder / "model.bin"
    if not model.exists():
        write_model(model, SHAPE, random_weights(SHAPE, seed=5))
    values = {
        "BINARY": trainer.binary,
        "MODEL": model,
        "TRAIN_DATA": work.train,
        "VAL_DATA": work.val,
        "OUTPUT": work.out,
        "BATCH": 2,
        "SEQ_LEN": 16,
        "TOTAL_BATCH": 2 * 16 * 8,
        "REDUCTION_WIDTH": 8,
        "STEPS": 24,
        "LEARNING_RATE": 1e-3,
        "WARMUP": 5,
        "FINAL_LR_FRACTION": 0.1,
        "VAL_EVERY": 12,
        "VAL_BATCHES": 4,
        "HELLASWAG": 0,
        "SAMPLE_EVERY": 0,
        "CHECKPOINT_EVERY": 4,
        "RETRY_WAIT_S": 0,
        "EXTRA_FLAGS": "--hash",
        **changes,
    }
    return {name: str(value) for name, value in values.items()}


def result_of(text: str) -> Result:
    """What a log says of the training itself."""
    return Result([], 0, text, "", 0.0)


def run_script(name: str, env: dict[str, str], timeout: float = 120) -> Result:
    """Runs a script of scripts/ to its end; what it started ends with it, at the latest here."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [str(SCRIPTS / name)],
        env={**os.environ, **MPI, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in processes_with("-o " + env["OUTPUT"]):
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{name}: no end after {timeout} s\n{stdout}\n{stderr}") from None
    return Result([name], process.returncode, stdout, stderr, time.monotonic() - begin)


def processes_with(*groups: str) -> list[int]:
    """Processes whose command line holds each of these groups of arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                line = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                if all(f" {group} " in line for group in groups):
                    found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def assert_same(text: str, expected: Result) -> None:
    """Each step that was printed, however often, and the end are those of the other run."""
    found = result_of(text)
    by_step = dict(zip((step.step for step in expected.steps), expected.numbers))
    assert {step.step for step in found.steps} == set(by_step), text
    for step in found.steps:
        assert step.numbers == by_step[step.step], text
    assert found.hash == expected.hash, text
    assert found.bits == expected.bits, text
    assert set(found.val_losses()) == set(expected.val_losses()), text


# ------------------------------------------------------------------------------ jobs of Slurm


@needs_slurm
@pytest.mark.parametrize("way", ["tcp", "fs", "mpi"])
def test_a_job_on_two_nodes_gives_the_bits_of_one_process(
    cluster: SlurmCluster, work: Workplace, fp32: Trainer, alone: Result, way: str
) -> None:
    job = submit(cluster, way, settings(work, fp32))
    assert job.wait() == "COMPLETED", job.show()
    assert re.search(r"\| processes +\| 4, ZeRO stage 1 ", job.text), job.text
    assert_same(job.text, alone)
    assert not list(work.out.glob("meeting*")), "the folder for -pi fs was left behind"


def submit(cluster: SlurmCluster, way: str, env: dict[str, str], *options: str) -> Job:
    """A job for two nodes with two GPUs each; SLURM_NTASKS_PER_NODE is not set in it."""
    options = ("--gpus-per-node=2", *options)
    if way == "mpi":
        script = MULTI_NODE / "run_gpt2_124M_mpi.sh"
        return cluster.submit(script, "--nodes=2", *options, env={**env, **MPI})
    return cluster.submit(MULTI_NODE / f"run_gpt2_124M_{way}.sbatch", *options, env=env)


@needs_slurm
@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_a_killed_rank_costs_no_bits(
    cluster: SlurmCluster, work: Workplace, slow: Trainer, slow_alone: Result, way: str
) -> None:
    job = submit(cluster, way, settings(work, slow, **SLOW))
    job.wait_for(lambda: max(checkpoints(work.out), default=0) >= 4)
    (victim,) = processes_with(f"-o {work.out}", "-pr 3")
    os.kill(victim, signal.SIGKILL)
    assert job.wait() == "COMPLETED", job.show()
    assert re.search(r"^== try 1 ended with status (?!0 )", job.text, re.MULTILINE), job.text
    assert len(re.findall(r"^resuming at step \d+", job.text, re.MULTILINE)) == 1, job.text
    assert_same(job.text, slow_alone)


@needs_slurm
def test_the_time_limit_puts_the_job_back_into_the_queue(
    cluster: SlurmCluster, work: Workplace, slow: Trainer, slow_alone: Result
) -> None:
    job = submit(cluster, "tcp", settings(work, slow, **SLOW))
    job.wait_for(lambda: "step    2/24 " in job.text)
    # What Slurm does some minutes before the limit, by the script's --signal=B:USR1@300.
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda: job.field("Restarts") == "1" and not job.is_running_here())
    (saved,) = re.findall(r"^SIGUSR1 to rank \d: stopped after (\d+) steps", job.text, re.M)
    assert checkpoints(work.out)[-1] == int(saved) < 24, job.show()
    # Slurm would wait two minutes. A node refuses a job within the second in which it was ended.
    time.sleep(2)
    cluster.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    assert job.wait() == "COMPLETED", job.show()
    assert f"stopped by USR1, checkpoint of step {saved} of 24" in job.text
    assert_same(job.text, slow_alone)


@needs_slurm
def test_a_cancelled_job_saves_and_a_new_one_goes_on(
    cluster: SlurmCluster, work: Workplace, slow: Trainer, slow_alone: Result
) -> None:
    env = settings(work, slow, CHECKPOINT_EVERY=24)
    first = submit(cluster, "fs", {**env, **SLOW})
    first.wait_for(lambda: "step    2/24 " in first.text)
    cluster.run("scancel", first.number)
    assert first.wait() == "CANCELLED", first.show()
    assert checkpoints(work.out), first.show()
    second = submit(cluster, "fs", env, "--ntasks-per-node=1")
    assert second.wait() == "COMPLETED", second.show()
    assert re.search(r"\| processes +\| 2, ", second.text), second.text
    assert_same(first.text + second.text, slow_alone)


@needs_slurm
@pytest.mark.parametrize("way", ["tcp", "fs", "mpi"])
def test_a_wrong_flag_of_a_job_was_tried_several_times(
    cluster: SlurmCluster, work: Workplace, fp32: Trainer, way: str
) -> None:
    job = submit(cluster, way, settings(work, fp32, EXTRA_FLAGS="-nonsense 1"))
    assert job.wait() == "FAILED", job.show()
    assert "error: -nonsense: unknown flag" in job.text and "== try" not in job.text, job.text
    assert not work.out.exists()


@needs_slurm
@pytest.mark.parametrize("options", [[], ["--ntasks-per-node=2", "--gpus-per-task=1"]])
def test_each_process_sees_all_gpus_of_its_node(
    cluster: SlurmCluster, work: Workplace, fp32: Trainer, options: list[str]
) -> None:
    show = work.folder / "show"
    show.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--dry-run*) exit;; esac\n'
        'echo "$SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES: $*" | sed "s/: .* -pg/: -pg/"\n'
        f"touch {work.out}/DONE_00000024\n"
    )
    show.chmod(0o755)
    env = settings(work, fp32, BINARY=show, PORT=1234, HEAD_ADDRESS="10.1.2.3")
    job = submit(cluster, "tcp", env, *options)
    assert job.wait() == "COMPLETED", job.show()
    shown = sorted(line for line in job.text.splitlines() if " sees " in line)
    start = "-pg 2 -pi tcp -ps 10.1.2.3 -pp 1234 -pn 4 -pr"
    nodes = ["n1", "n1", "n2", "n2"]
    assert shown == [f"{node} sees 0,1: {start} {i}" for i, node in enumerate(nodes)], job.text


# ------------------------------------------------------------- what the jobs ask Slurm and the node


def bash(code: str, env: dict[str, str], path: Path) -> subprocess.CompletedProcess:
    """Runs code after sourcing the scripts' functions; programs in `path` go before the others."""
    script = f"set -euo pipefail; source scripts/lib.sh; source scripts/multi_node/slurm.sh; {code}"
    clean = {name: v for name, v in os.environ.items() if not name.startswith(("SLURM", "CUDA"))}
    clean["PATH"] = f"{path}:{clean['PATH']}"
    return subprocess.run(
        ["bash", "-c", script], env={**clean, **env}, capture_output=True, text=True, cwd=REPO_ROOT
    )


def program(folder: Path, name: str, output: str, status: int = 0) -> None:
    """A program that prints this and does nothing else."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'end'\n{output}\nend\nexit {status}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"GPUS_PER_NODE": "3", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "8"}, "3"),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "8"}, "4"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_GPUS": "0,1"}, "8"),
        ({"SLURM_GPUS_PER_NODE": "h200:6"}, "6"),
        ({"SLURM_GPUS_PER_NODE": "6", "SLURM_JOB_GPUS": "0,1"}, "6"),
        ({"SLURM_JOB_GPUS": "0,2,5"}, "3"),
        ({"SLURM_JOB_GPUS": "0-3,6"}, "5"),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, "2"),
        ({}, "5"),  # nvidia-smi's answer
    ],
)
def test_gpus_per_node(env: dict[str, str], expected: str, tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "\n".join(f"GPU {i}: H200 (UUID: GPU-{i})" for i in range(5)))
    result = bash("job_gpus_per_node", env, tmp_path)
    assert (result.stdout.strip(), result.stderr) == (expected, "")


@pytest.mark.parametrize(
    "case, addresses, node_address, nodes, expected",
    [
        ("a name with one address", ["10.0.0.1"], "node1", 2, "10.0.0.1"),
        ("a node's own name is a loopback name", ["127.0.1.1"], "10.0.0.2", 2, "10.0.0.2"),
        ("loopback first", ["127.0.1.1", "10.0.0.3"], "node1", 2, "10.0.0.3"),
        ("IPv6", ["::1", "fe80::1", "2001:db8::1"], "node1", 2, "2001:db8::1"),
        ("a name that only Slurm knows", [], "10.0.0.4", 2, "10.0.0.4"),
        ("one node needs no address", [], "node1", 1, "127.0.0.1"),
        ("no address at all", [], "node1", 2, "error"),
    ],
)
def test_address_of_the_head_node(
    case: str, addresses: list[str], node_address: str, nodes: int, expected: str, tmp_path: Path
) -> None:
    listed = "\n".join(f"{a:<16}{kind}" for a in addresses for kind in ("STREAM", "DGRAM", "RAW"))
    program(tmp_path, "getent", listed, 0 if addresses else 2)
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\n"
        "if [ $2 = hostnames ]; then echo node1; echo node2; exit; fi\n"
        f"echo '   NodeAddr={node_address} NodeHostName=node1 Version=22.05.8'\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    env = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": str(nodes)}
    result = bash("head_address", env, tmp_path)
    if expected == "error":
        assert result.returncode == 1 and "set HEAD_ADDRESS" in result.stderr, case
    else:
        assert (result.stdout.strip(), result.stderr) == (expected, ""), case
    given = bash("head_address", {**env, "HEAD_ADDRESS": "10.9.9.9"}, tmp_path)
    assert given.stdout.strip() == "10.9.9.9"


# --------------------------------------------------------------------------------- one machine


def test_settings_are_the_flags(work: Workplace, fp32: Trainer, alone: Result) -> None:
    result = run_script("run_gpt2_124M.sh", settings(work, fp32, GPUS=1))
    assert result.status == 0, result
    assert_same(result.stdout, alone)
    assert checkpoints(work.out) == [20, 24], "CHECKPOINTS_KEPT is 2"


def test_mpi_script_gives_the_bits_of_one_process(
    work: Workplace, fp32: Trainer, alone: Result
) -> None:
    hosts = work.folder / "hosts"
    hosts.write_text("# this machine\nlocalhost slots=4\n")
    env = settings(work, fp32, HOSTFILE=hosts)
    result = run_script("multi_node/run_gpt2_124M_mpi.sh", env)
    assert result.status == 0, result
    assert re.search(r"\| processes +\| 4, ZeRO stage 1 ", result.stdout), result
    assert_same(result.stdout, alone)


def test_script_for_one_machine_goes_on_after_a_signal(
    work: Workplace, slow: Trainer, slow_alone: Result
) -> None:
    two = settings(work, slow, GPUS=2, CHECKPOINT_EVERY=24)
    with subprocess.Popen(
        [SCRIPTS / "run_gpt2_124M.sh"],
        env={**os.environ, **MPI, **two, **SLOW},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step    2/24 "):
                process.send_signal(signal.SIGTERM)
    first = "".join(lines)
    assert process.returncode == 2, first
    assert "== stopped by TERM" in first
    assert len(checkpoints(work.out)) == 1, first
    second = run_script("run_gpt2_124M.sh", two)
    assert second.status == 0, second
    assert_same(first + second.stdout, slow_alone)
    third = run_script("run_gpt2_124M.sh", two)
    assert (third.status, third.steps) == (0, []), third


@pytest.mark.parametrize("name", SIZES)
def test_scripts_train_the_size_that_they_are_named_after(
    name: str, work: Workplace, fp32: Trainer
) -> None:
    tokens = write_tokens(work.folder / "long.bin", [1, 2, 3] * 1000)
    env = {"BINARY": str(fp32.binary), "TRAIN_DATA": str(tokens), "VAL_DATA": str(tokens)}
    env.update(BATCH="1", OUTPUT=str(work.out), GPUS="1", HELLASWAG="0", MAX_FAILURES="1")
    result = run_script(name, {**env, "EXTRA_FLAGS": "--dry-run"})
    # The plan is printed; then there is too little memory for it here, or not.
    assert re.search(rf"\| parameters +\| {SIZES[name]} ", result.stdout), result


def rate_of(script: str) -> int:
    text = (SCRIPTS / script).read_text()
    return int(re.search(r"^train_here (\d+) ", text, re.MULTILINE)[1])


@pytest.mark.parametrize("script", SIZES)
def test_cost_in_scripts_is_that_of_their_speed(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    rate = rate_of(script)
    steps = int(re.search(r"STEPS:=(\d+)", text)[1])
    hours = steps * 524288 / rate / 3600
    assert f"about {hours:.1f} hours x GPUs, at {rate:,} tokens/s" in text
    every, minutes = map(int, re.search(r"EVERY:=(\d+)}\" +# steps: (\d+) minutes", text).groups())
    assert round(every * 524288 / rate / 60) == minutes


@pytest.mark.parametrize("script, work, batch", [
    ("run_gpt2_124M.sh", "d12", 64), ("run_gpt2_350M.sh", "d24", 32),
    ("run_gpt2_1558M.sh", "d48", 16),
])
def test_speed_in_scripts_is_the_one_measured_last(script: str, work: str, batch: int) -> None:
    """Within 5 %, by which machines of one kind differ."""
    newest = ("", 0.0)
    for path in (REPO_ROOT / "dev/bench/results").glob("h200-*speed*.json"):
        results = json.loads(path.read_text())
        speed = results["speed"].get(work, {})
        speed = speed.get("trainer", speed)  # beside PyTorch, or alone
        if f" -b {batch} " in speed.get("command", ""):
            newest = max(newest, (results["date"], np.median(speed["tokens_per_second"])))
    assert abs(rate_of(script) / newest[1] - 1) < 0.05, f"{newest}"


def flops_per_token(layers: int, channels: int, length: int) -> int:
    """As llmc/mfu.h counts them."""
    parameters = 50304 * channels + layers * (12 * channels + 13) * channels + 2 * channels
    return 6 * parameters + 6 * layers * channels * length


@pytest.mark.parametrize("script, shape, like, its_shape", [
    ("run_gpt2_774M.sh", (36, 1280, 1024), "run_gpt2_350M.sh", (24, 1024, 1024)),
    ("run_gpt3_125M.sh", (12, 768, 2048), "run_gpt2_124M.sh", (12, 768, 1024)),
])
def test_speed_that_was_not_measured_is_that_of_the_flops(
    script: str, shape: tuple[int, ...], like: str, its_shape: tuple[int, ...]
) -> None:
    expected = rate_of(like) * flops_per_token(*its_shape) / flops_per_token(*shape)
    assert abs(rate_of(script) / expected - 1) < 0.02
    assert f"{rate_of(like):,}" in (SCRIPTS / script).read_text().replace("\n# ", " ")


# ------------------------------------------------------------------ settings that can never work


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name, value, part", [
    ("LEARNING_RATE", "6e-4x", "-l 6e-4x: must be a number from 0 to 10 (-l is LEARNING_RATE)"),
    ("WARMUP", "-1", "-u -1: must be at least 0 (-u is WARMUP)"),
    ("ZERO_STAGE", "4", "(-z is ZERO_STAGE)"),
    ("RECOMPUTE", "3", "(-r is RECOMPUTE)"),
    ("WEIGHT_DECAY", "x", "(-c is WEIGHT_DECAY)"),
    ("MODEL", "none.bin", "(-e is MODEL)"),
    ("TRAIN_DATA", "none_*.bin", "(-i is TRAIN_DATA)"),
    ("VAL_DATA", "none.bin", "(-j is VAL_DATA)"),
    ("VAL_DATA", "README.md", "README.md: "),
    ("EXTRA_FLAGS", "-nonsense 1", "-nonsense: unknown flag"),
    ("TOTAL_BATCH", "100", "(-d is TOTAL_BATCH)"),
])
def test_settings_that_can_never_work_were_tried_three_times(
    name: str, value: str, part: str, gpus: int, work: Workplace, fp32: Trainer
) -> None:
    env = settings(work, fp32, GPUS=gpus, OUTPUT=work.folder / "new" / "out", **{name: value})
    result = run_script("run_gpt2_124M.sh", env)
    assert result.status == 1 and "== try" not in result.stdout, result
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result
    assert part in result.stderr, result
    assert not (work.folder / "new").exists()


def test_a_total_batch_of_one_process_is_checked_for_all(work: Workplace, fp32: Trainer) -> None:
    result = run_script("run_gpt2_124M.sh", settings(work, fp32, GPUS=2, TOTAL_BATCH=32))
    assert result.status == 1 and "-d 32: not divisible by B*T*N" in result.stderr, result
    assert not work.out.exists()


def test_a_failure_that_names_no_setting_is_tried_again(work: Workplace, fp32: Trainer) -> None:
    once = work.folder / "once"
    once.write_text(
        f"#!/bin/sh\n[ -e {work.folder}/mark ] && exec {fp32.binary} \"$@\"\n"
        f"touch {work.folder}/mark\necho 'train_gpt2: rank 1 did not arrive' >&2\nexit 1\n"
    )
    once.chmod(0o755)
    result = run_script("run_gpt2_124M.sh", settings(work, fp32, GPUS=1, BINARY=once))
    assert result.status == 0 and "rank 1 did not arrive" in result.stderr, result
    assert checkpoints(work.out)[-1] == 24


def test_a_wrong_setting_of_a_resume_keeps_the_checkpoints(work: Workplace, fp32: Trainer) -> None:
    env = settings(work, fp32, GPUS=1, STEPS=4)
    assert run_script("run_gpt2_124M.sh", env).status == 0
    before = snapshot(work.out)
    result = run_script("run_gpt2_124M.sh", {**env, "STEPS": "8", "LEARNING_RATE": "x"})
    assert result.status == 1 and result.stdout.count("== try") > 1, result
    assert "-l x: must be a number" in result.stderr, result
    assert snapshot(work.out) == before
    result = run_script("run_gpt2_124M.sh", {**env, "STEPS": "8"})
    assert result.status == 0 and "resuming at step 4" in result.stdout, result


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("flag, part", [
    ("--dry-run", "| parameters "), ("--help", "usage: "), ("--version", "train_gpt2"),
])
def test_a_dry_run_was_called_stopped_by_a_signal(
    flag: str, part: str, gpus: int, work: Workplace, fp32: Trainer
) -> None:
    result = run_script("run_gpt2_124M.sh", settings(work, fp32, GPUS=gpus, EXTRA_FLAGS=flag))
    assert result.status == 0 and result.stdout.count(part) == 1, result
    assert "== try" not in result.stdout and "stopped by" not in result.stdout, result
    assert not work.out.exists()


@pytest.mark.parametrize(
    "script", [*SIZES, *(f"multi_node/{path.name}" for path in MULTI_NODE.glob("run*"))]
)
def test_a_first_start_did_not_know_of_hellaswag(script: str) -> None:
    head = (SCRIPTS / script).read_text().split("\nset -euo")[0]
    assert all(f"dev/data/{name}.py" in head for name in ("fineweb", "hellaswag"))


def test_a_missing_hellaswag_was_found_three_times(work: Workplace, fp32: Trainer) -> None:
    elsewhere = work.folder / "elsewhere" / "scripts"  # without data, whether it is here or not
    shutil.copytree(SCRIPTS, elsewhere)
    env = settings(work, fp32, GPUS=1, HELLASWAG=1)
    result = run_script(str(elsewhere / "run_gpt2_124M.sh"), env)
    assert result.status == 1 and result.stderr.count("\n") == 1, result
    assert "dev/data/hellaswag.py makes it (-h is HELLASWAG)" in result.stderr, result
    assert not work.out.exists()
