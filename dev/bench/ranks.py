"""Starts the processes of one training, a GPU each, and gathers what they print.

    with Job("build/cuda-bf16-cudnn/train_gpt2cu", 2, "tcp", ["-x", 10]) as job:
        run = job.wait(60)
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

WAYS = ("mpi", "tcp", "fs")
LOCALHOST = "127.0.0.1"
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# OpenMPI refuses root, and more processes than cores, unless told otherwise.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def count_gpus() -> int:
    """GPUs that the driver names; 0 without one."""
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in result.stdout.splitlines())


def free_port() -> int:
    """A TCP port that nobody listens on, below those of outgoing connections."""
    while True:
        port = random.randrange(30000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue


def kill_quietly(kill: Callable[[int, int], None], pid: int) -> None:
    try:
        kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_with_parent(number: int) -> None:
    """This process gets the signal when the thread that started it ends, however that ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def plan_row(output: str, name: str) -> str | None:
    """What the trainer's table at the start says of `name`."""
    found = re.search(rf"^\| {re.escape(name)} +\| (.*?) +\|$", output, re.MULTILINE)
    return found[1] if found else None


@dataclass
class Ended:
    """How a job ended. With mpi, each rank's status is mpirun's."""

    command: list[str]
    statuses: list[int]
    outputs: list[str]  # stdout, by rank
    errors: list[str]  # stderr, by rank
    seconds: float
    launcher: str = ""  # what mpirun printed

    @property
    def stdout(self) -> str:
        return self.outputs[0]

    def __str__(self) -> str:
        lines = [f"$ {' '.join(self.command)}", f"{self.seconds:.1f} s, status {self.statuses}"]
        # Without the tables at the start.
        plain = [line for line in self.stdout.splitlines() if not line.startswith(("|", "+-"))]
        lines += plain[-30:]
        for rank, text in enumerate(self.errors):
            lines += [f"rank {rank}: {line}" for line in text.splitlines()[-10:]]
        return "\n".join(lines + self.launcher.splitlines()[-10:])


class JobError(Exception):
    """A job that did not end in time, or ended too early."""


class Job:
    """A training of `count` processes. way: mpi, tcp or fs; "" starts one process as it is.

    `env` is added to the environment of all; `rank_env` is one for each rank. `prefix` stands
    before the trainer, as for a tool that runs it. `per_node`: ranks of a node (-pg), all without
    it; mpi goes by the hosts' names. The processes end with the thread that makes the Job.
    """

    def __init__(
        self,
        binary: str | Path,
        count: int,
        way: str,
        args: Sequence[object],
        env: Mapping[str, str] | None = None,
        rank_env: Sequence[Mapping[str, str]] = (),
        prefix: Sequence[str] = (),
        per_node: int | None = None,
    ) -> None:
        self.count = count
        self.rank_env = rank_env
        self.folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        self.command = [*prefix, str(binary), *map(str, args)]
        self.begin = time.monotonic()
        self.processes: list[subprocess.Popen] = []
        env = {**os.environ, **(env or {})}
        try:
            if way == "mpi":
                self._start_mpirun(env)
            else:
                self._start_ranks(way, env, per_node or count)
        except BaseException:  # a signal, too
            self.__exit__()
            raise

    def _start_ranks(self, way: str, env: Mapping[str, str], per_node: int) -> None:
        where: list[str] = []
        if way == "tcp":
            where = ["-ps", LOCALHOST, "-pp", str(free_port())]
        elif way == "fs":
            where = ["-pf", str(self.folder)]
        for rank in range(self.count):
            command = list(self.command)
            if way:
                command += ["-pi", way, "-pn", str(self.count), "-pr", str(rank),
                            "-pg", str(per_node)]
            own = self.rank_env[rank] if self.rank_env else {}
            self.processes.append(self._open(command + where, {**env, **own}, str(rank)))

    def _open(self, command: list[str], env: Mapping[str, str], name: str) -> subprocess.Popen:
        # mpirun ends its processes when it is asked to end.
        ending = signal.SIGTERM if name == "mpirun" else signal.SIGKILL
        with open(self.folder / f"{name}.out", "wb") as out:
            with open(self.folder / f"{name}.err", "wb") as err:
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                        env=env, start_new_session=True,
                                        preexec_fn=lambda: end_with_parent(ending))

    def _start_mpirun(self, env: Mapping[str, str]) -> None:
        # A file for each rank: mpirun would mix what they print. Binding to a core would have the
        # threads of a process share it.
        here = shlex.quote(str(self.folder))
        script = self.folder / "rank.sh"
        own = "".join(
            f"[ $OMPI_COMM_WORLD_RANK != {rank} ] || export {name}={shlex.quote(value)}\n"
            for rank, names in enumerate(self.rank_env) for name, value in names.items())
        script.write_text(f"r={here}/$OMPI_COMM_WORLD_RANK\necho $$ >$r.pid\n{own}"
                          f"exec {shlex.join(self.command)} >$r.out 2>$r.err\n")
        command = ["mpirun", "-np", str(self.count), "--bind-to", "none", "sh", str(script)]
        self.processes.append(self._open(command, {**env, **MPI_ENV}, "mpirun"))

    def text(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait_for(self, text: str, timeout: float) -> None:
        """Waits until rank 0 has printed `text`."""
        end = time.monotonic() + timeout
        while text not in self.text("0.out"):
            if self.ended():
                raise JobError(f"ended before {text!r}\n{self._gather()}")
            if time.monotonic() > end:
                raise JobError(f"no {text!r} within {timeout:g} s\n{self._gather()}")
            time.sleep(0.02)

    def wait(self, timeout: float) -> Ended:
        """Waits for the end of all. A longer run is killed: JobError."""
        end = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                raise JobError(f"no end within {timeout:g} s\n{self._gather()}") from None
        return self._gather()

    def _gather(self) -> Ended:
        statuses = [-999 if p.poll() is None else p.returncode for p in self.processes]
        if len(statuses) < self.count:
            statuses *= self.count
        outputs = [self.text(f"{rank}.out") for rank in range(self.count)]
        errors = [self.text(f"{rank}.err") for rank in range(self.count)]
        launcher = self.text("mpirun.out") + self.text("mpirun.err")
        return Ended(self.command, statuses, outputs, errors, time.monotonic() - self.begin,
                     launcher)

    def kill(self) -> None:
        """Ends what still runs of this job."""
        running = [process for process in self.processes if process.poll() is None]
        if not running:
            return
        for file in self.folder.glob("*.pid"):  # of mpirun's processes, which end before it
            if file.read_text().endswith("\n"):
                kill_quietly(os.kill, int(file.read_text()))
        for process in running:
            kill_quietly(os.killpg, process.pid)
            process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_job(binary: str | Path, count: int, way: str, args: Sequence[object],
            timeout: float = 120, **how: object) -> Ended:
    """Starts all ranks and waits for their end, however that is."""
    with Job(binary, count, way, args, **how) as job:
        return job.wait(timeout)
