"""Starts the ranks of a program by mpirun, tcp or fs, and waits for all of them."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

LOCALHOST = "127.0.0.1"
# OpenMPI refuses root, and more ranks than cores, unless told otherwise.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
# What a surrounding job has set would tell our processes that they belong to it.
FOREIGN = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True)
class Ended:
    """How one rank ended. `status` is mpirun's for all ranks of it, None after the time limit."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """What it said on stderr, without the name of program and rank."""
        lines = [line for line in self.stderr.splitlines() if not line.startswith("warning")]
        return re.sub(r"^train_gpt2\w*: (rank \d+(, [^:]*)?: )?", "", lines[0]) if lines else ""


def free_port() -> int:
    """A TCP port that nobody listens on now, below those of outgoing connections."""
    while True:
        port = random.randrange(30000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def first_sentence(text: str) -> str:
    """Of what mpirun says, which it breaks into lines between rules."""
    lines = [line.strip() for line in text.splitlines() if line.strip("- ")]
    return " ".join(lines).split(". ")[0]


def first_error(ranks: Sequence[Ended]) -> str:
    """One line on why a run failed; "" when it did not."""
    if all(rank.status == 0 for rank in ranks):
        return ""
    errors = [(i, rank.error) for i, rank in enumerate(ranks) if rank.error]
    # A rank that ends because of another begins with that one's name, and is not the cause.
    causes = [(i, error) for i, error in errors if not error.startswith("rank ")] or errors
    if causes:
        return "rank {}: {}".format(*causes[0])
    if any(rank.status is None for rank in ranks):
        return "no end within the time limit"
    return f"ended with status {next(rank.status for rank in ranks if rank.status)}"


class Launcher:
    """Runs in folders of its own under `folder`; what still runs at the time limit is killed."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder = folder
        self.limit_s = limit_s

    def run(self, command: Callable[[int], Sequence[object]], count: int, mpi: bool) -> list[Ended]:
        """Runs command(rank) as rank 0 ... count-1, all by one mpirun or each by itself."""
        place = Path(tempfile.mkdtemp(prefix="run_", dir=self.folder))
        commands = [list(map(str, command(rank))) for rank in range(count)]
        env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        for name in ("LLMC_INIT_TIMEOUT_S", "LLMC_COMM_TIMEOUT_S"):
            env.setdefault(name, "60")
        env["GRADE_BEGAN_NS"] = str(time.monotonic_ns())
        if mpi:
            script = place / "rank.sh"
            script.write_text(self._mpi_script(commands, place))
            words = ["mpirun", "-np", str(count), "sh", str(script)]
            processes = [self._open(words, {**env, **MPI_ENV}, place, "mpirun")]
        else:
            processes = [self._open(words, env, place, str(r)) for r, words in enumerate(commands)]
        self._wait(processes, place)
        return [self._ended(place, rank, processes[0 if mpi else rank]) for rank in range(count)]

    @staticmethod
    def _mpi_script(commands: list[list[str]], place: Path) -> str:
        """Each rank writes into files of its own: mpirun would mix their lines."""
        here = shlex.quote(str(place))
        cases = [
            f"{rank}) exec {shlex.join(words)} >{here}/{rank}.out 2>{here}/{rank}.err;;"
            for rank, words in enumerate(commands)
        ]
        lines = [f"echo $$ >{here}/$OMPI_COMM_WORLD_RANK.pid", "case $OMPI_COMM_WORLD_RANK in"]
        return "\n".join([*lines, *cases, "esac", ""])

    @staticmethod
    def _open(words: list[str], env: dict[str, str], place: Path, name: str) -> subprocess.Popen:
        with open(place / f"{name}.out", "wb") as out, open(place / f"{name}.err", "wb") as err:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                    env=env, start_new_session=True)

    def _wait(self, processes: list[subprocess.Popen], place: Path) -> None:
        end = time.monotonic() + self.limit_s
        try:
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill([process for process in processes if process.poll() is None], place)

    @staticmethod
    def _kill(running: list[subprocess.Popen], place: Path) -> None:
        if not running:
            return  # mpirun does not end before its ranks
        for file in place.glob("*.pid"):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except (ValueError, ProcessLookupError):
                continue
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @staticmethod
    def _ended(place: Path, rank: int, process: subprocess.Popen) -> Ended:
        def text(name: str) -> str:
            file = place / name
            return file.read_text(errors="replace") if file.exists() else ""

        status = None if process.returncode == -signal.SIGKILL else process.returncode
        stderr = text(f"{rank}.err") or first_sentence(text("mpirun.err"))
        return Ended(status, text(f"{rank}.out"), stderr)
