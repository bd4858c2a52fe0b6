"""Starts the ranks of one training as real processes, waits for all of them, compares their bits.

Ranks start as -pi says: all of them by one mpirun, or each by itself for tcp and fs.
"""

from __future__ import annotations

import itertools
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
from typing import Callable, Iterable, Mapping, Sequence, Union

import pytest

from helpers import CRASH_WORDS, Result, Trainer, Workplace

WAYS = ("mpi", "tcp", "fs")
SIZES = (1, 2, 4, 8)  # numbers of ranks that are to give the same bits
LOCALHOST = "127.0.0.1"

# OpenMPI refuses root, and more ranks than cores, unless told otherwise.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

Args = Sequence[object]
Env = Mapping[str, str]
PerRank = Union[Args, Callable[[int], Args]]  # the same for all, or by rank
EnvPerRank = Union[Env, Callable[[int], Env]]


def find_binary(config: pytest.Config, folder: str, make: str) -> Trainer:
    """The trainer of a build that `make test` does not make by itself."""
    binary = Path(config.getoption("--build-dir")).resolve() / folder / "train_gpt2cpu"
    if not binary.exists():
        pytest.fail(f"{binary} is missing; run: {make}")
    return Trainer(binary, "bf16" if "bf16" in folder else "fp32")


def switches_binary(config: pytest.Config) -> Trainer:
    """The BF16 build with switches for planted faults, delays, junk and host names."""
    make = "make train_gpt2cpu PRECISION=BF16 SWITCHES=1"
    return find_binary(config, "cpu-bf16-switches", make)


# Below the ports that the kernel gives to outgoing connections. When pytest has several processes,
# gw0, gw1, ..., each has ports of its own.
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_ports = itertools.cycle(range(20000 + _process % 16, 30000, 16))
for _ in range(random.randrange(625)):
    next(_ports)


def free_port() -> int:
    """A TCP port that nobody listens on now, another one at each call."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
        return True
    except OSError:
        return False


def connections(port: int) -> int:
    """How many there are to a port of this machine that somebody listens on."""
    established = "01"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == established
               for line in lines)


# ------------------------------------------------------------------------------ how a run ended


@dataclass(repr=False)
class Joint:
    """How the ranks of one training ended. With mpi, each rank's status is mpirun's."""

    way: str
    ranks: dict[int, Result]
    seconds: float
    mpirun: str = ""  # what mpirun itself printed

    @property
    def first(self) -> Result:
        return self.ranks[0]

    @property
    def statuses(self) -> list[int]:
        return [result.status for result in self.ranks.values()]

    @property
    def errors(self) -> dict[int, list[str]]:
        """Lines on stderr that are no warnings, of ranks that have any."""
        return {rank: result.errors for rank, result in self.ranks.items() if result.errors}

    @property
    def error_text(self) -> str:
        return "\n".join(f"rank {r}: {line}" for r, lines in self.errors.items() for line in lines)

    @property
    def stdout(self) -> str:
        return "".join(result.stdout for result in self.ranks.values())

    def __str__(self) -> str:
        parts = [f"{len(self.ranks)} ranks by {self.way}, {self.seconds:.2f} s"]
        parts += [f"=== rank {rank}: {result}" for rank, result in self.ranks.items()]
        return "\n".join(parts + ([f"=== mpirun\n{self.mpirun}"] if self.mpirun else []))

    __repr__ = __str__


def assert_all_end_well(run: Joint) -> None:
    assert set(run.statuses) == {0}, f"expected status 0 of every rank\n{run}"
    assert not run.errors, f"expected nothing but warnings on stderr\n{run}"
    for result in run.ranks.values():
        assert result is run.first or not result.stdout, f"only rank 0 prints\n{run}"


def assert_all_fail(run: Joint, *needles: str) -> None:
    """Every rank ends with an error, in at most one line each; some line holds all needles."""
    for rank, result in run.ranks.items():
        assert result.status > 0, f"rank {rank}: expected an error status\n{run}"
        assert len(result.errors) <= 1, f"rank {rank}: expected one line at most\n{run}"
        for word in CRASH_WORDS:
            assert word not in result.stdout + result.stderr, f"{word!r} in the output\n{run}"
    lines = [line for lines in run.errors.values() for line in lines]
    fits = any(all(needle in line for needle in needles) for line in lines)
    assert fits, f"no message holds all of {needles}\n{run}"


def assert_all_refused(run: Joint, *needles: str) -> None:
    """As assert_all_fail, and the status is 1: found by a check."""
    assert_all_fail(run, *needles)
    assert set(run.statuses) == {1}, f"expected status 1 of every rank\n{run}"


# ------------------------------------------------------------------------------- running ranks


class Ranks:
    """The ranks of one training while they run. Used with `with`: none is left behind.

    `count` is -pn; `only` starts some of them alone. args, env and prefix may depend on the rank.
    `mpirun` holds more options of that program, `init` replaces what tcp and fs are told (-ps, -pp
    or -pf).
    """

    def __init__(
        self,
        trainer: Trainer,
        count: int,
        way: str,
        args: PerRank,
        folder: Path,
        env: EnvPerRank | None = None,
        prefix: Sequence[str] | Callable[[int], Sequence[str]] = (),
        only: Iterable[int] | None = None,
        init: Args | None = None,
        mpirun: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> None:
        self.trainer, self.count, self.way = trainer, count, way
        self.args, self.env, self.prefix, self.mpirun, self.cwd = args, env, prefix, mpirun, cwd
        self.folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=folder))
        self.init = self._meeting_place() if init is None else list(init)
        self.started: dict[int, subprocess.Popen] = {}
        self.begin = time.monotonic()
        wanted = list(range(count) if only is None else only)
        if way == "mpi":
            self._start_mpirun()
        else:
            for rank in wanted:
                self.start(rank)

    def _meeting_place(self) -> Args:
        if self.way == "tcp":
            return ["-ps", LOCALHOST, "-pp", free_port()]
        if self.way == "fs":
            place = self.folder / "meet"
            place.mkdir()
            return ["-pf", place]
        return []

    def _of_rank(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """A rank's command, and what its environment has besides ours."""
        args = self.args(rank) if callable(self.args) else self.args
        env = self.env(rank) if callable(self.env) else self.env
        prefix = self.prefix(rank) if callable(self.prefix) else self.prefix
        way = ["-pi", self.way]
        if self.way != "mpi":
            way += ["-pn", self.count, "-pr", rank]
            way += [] if "-pg" in args else ["-pg", 8]
        command = [*prefix, self.trainer.binary, *args, *way, *self.init]
        return list(map(str, command)), dict(env or {})

    def _open(self, command: list[str], env: Env, name: str) -> subprocess.Popen:
        with open(self.folder / f"{name}.out", "wb") as out:
            with open(self.folder / f"{name}.err", "wb") as err:
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                        env={**os.environ, **env}, cwd=self.cwd,
                                        start_new_session=True)

    def start(self, rank: int) -> None:
        """Starts one more rank of tcp or fs."""
        command, env = self._of_rank(rank)
        self.started[rank] = self._open(command, env, str(rank))

    def _start_mpirun(self) -> None:
        # Each rank's output goes into files of its own: mpirun would mix it with its own.
        here = shlex.quote(str(self.folder))
        cases = []
        for rank in range(self.count):
            command, env = self._of_rank(rank)
            words = shlex.join([*(f"{name}={value}" for name, value in env.items()), *command])
            cases.append(f"{rank}) exec env {words} >{here}/{rank}.out 2>{here}/{rank}.err;;\n")
        script = self.folder / "rank.sh"
        script.write_text(f"echo $$ >{here}/$OMPI_COMM_WORLD_RANK.pid\n"
                          f"case $OMPI_COMM_WORLD_RANK in\n{''.join(cases)}esac\n")
        command = ["mpirun", "-np", str(self.count), *self.mpirun, "sh", str(script)]
        self.mpirun_process = self._open(command, MPI_ENV, "mpirun")

    # ---- while they run

    def pid(self, rank: int, timeout: float = 30) -> int:
        if rank in self.started:
            return self.started[rank].pid
        file = self.folder / f"{rank}.pid"
        self.wait_until(lambda: file.exists() and file.read_text().endswith("\n"), timeout)
        return int(file.read_text())

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pid(rank), number)

    def _processes(self) -> list[subprocess.Popen]:
        return list(self.started.values()) if self.way != "mpi" else [self.mpirun_process]

    def _text(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""

    def stdout(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        return self._text(f"{rank}.out")

    def stderr(self, rank: int) -> str:
        return self._text(f"{rank}.err")

    def wait_until(self, condition: Callable[[], bool], timeout: float = 30) -> None:
        """Waits for something that the running ranks bring about."""
        end = time.monotonic() + timeout
        while not condition():
            if all(process.poll() is not None for process in self._processes()):
                if condition():
                    return
                raise AssertionError(f"they ended too early\n{self.wait()}")
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"waited longer than {timeout} s\n{self._gather()}")
            time.sleep(0.005)

    def wait_for_step(self, step: int, timeout: float = 30) -> None:
        line = re.compile(rf"^step +{step}/", re.MULTILINE)
        self.wait_until(lambda: line.search(self.stdout()) is not None, timeout)

    def wait(self, timeout: float = 60) -> Joint:
        """Waits for the end of all ranks. A longer run is killed and fails the test."""
        end = time.monotonic() + timeout
        for process in self._processes():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                running = [r for r, p in self.started.items() if p.poll() is None] or "mpirun"
                self.kill()
                raise AssertionError(
                    f"no end after {timeout} s of {running}\n{self._gather()}") from None
        return self._gather()

    def _gather(self) -> Joint:
        seconds = time.monotonic() - self.begin
        ranks = {}
        for rank in range(self.count) if self.way == "mpi" else sorted(self.started):
            process = self.mpirun_process if self.way == "mpi" else self.started[rank]
            command, _ = self._of_rank(rank)
            status = process.poll()
            ranks[rank] = Result(command, -999 if status is None else status, self.stdout(rank),
                                 self.stderr(rank), seconds)
        mpirun = self._text("mpirun.out") + self._text("mpirun.err")
        return Joint(self.way, ranks, seconds, mpirun)

    def kill(self) -> None:
        """Kills what still runs."""
        pids = [int(file.read_text() or 0) for file in self.folder.glob("*.pid")]
        running = [process for process in self._processes() if process.poll() is None]
        if self.way == "mpi" and not running:
            return  # mpirun does not end before its ranks
        for pid in filter(None, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in running:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def run_ranks(
    trainer: Trainer, count: int, way: str, args: PerRank, folder: Path, timeout: float = 60,
    **how: object,
) -> Joint:
    """Starts all ranks and waits for their end, however that is."""
    with Ranks(trainer, count, way, args, folder, **how) as ranks:
        return ranks.wait(timeout)


def train_ranks(
    trainer: Trainer, count: int, way: str, args: PerRank, folder: Path, timeout: float = 60,
    **how: object,
) -> Joint:
    """As run_ranks, and all must go well."""
    run = run_ranks(trainer, count, way, args, folder, timeout, **how)
    assert_all_end_well(run)
    return run


# ------------------------------------------------------------------------------------ same bits


def bits_of(result: Result) -> dict[str, object]:
    """All that must not depend on the number of ranks: step lines, what --check-ranks prints, and
    at the end the bits of loss and norm and the hashes of weights, m, v, master."""
    words = result.bits.split()[1:]
    found: dict[str, object] = dict(zip(words[::2], words[1::2]))
    assert set(found) == {"loss", "norm", "m", "v", "master"}, f"{result.bits}"
    found["weights"] = result.hash
    found["step lines"] = result.numbers
    found["steps"] = checked_steps(result)
    return found


@dataclass(frozen=True)
class CheckedStep:
    """What --check-ranks prints of a step: the hash that the weights of all ranks have after it,
    and the bits of its loss and norm (none of step 0)."""

    step: int
    weights: str
    bits: str


CHECKED_STEP = re.compile(
    r"^weights of step (\d+): ([0-9a-f]{16}) on all ranks"
    r"(|, bits loss [0-9a-f]{16} norm [0-9a-f]{16})$",
    re.MULTILINE,
)


def checked_steps(result: Result) -> list[CheckedStep]:
    found = CHECKED_STEP.findall(result.stdout)
    return [CheckedStep(int(step), weights, bits) for step, weights, bits in found]


def assert_same_bits(one: Result, other: Result) -> None:
    """Two trainings of the same steps agree in every bit."""
    assert one.steps, f"no step line\n{one}"
    a, b = bits_of(one), bits_of(other)
    names = [name for name in a if a[name] != b[name]]
    assert not names, f"different: {', '.join(names)}\n{one}\n{other}"


class Lab:
    """A folder with data for small runs; runs of one process are made once and kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = Workplace(folder)
        self._ones: dict[object, Result] = {}

    def args(self, micro: int = 8, changes: Mapping[str, object] | None = None) -> list[object]:
        """Ten steps of `micro` micro-batches of 16 tokens."""
        flags = {"-b": 1, "-t": 16, "-d": 16 * micro, "-x": 10, "-c": 0.1, **(changes or {})}
        return self.work.args(flags, "--hash", "--check-ranks")

    def one(self, trainer: Trainer, args: Args, **how: object) -> Result:
        """The run that all others are compared with."""
        key = (trainer.binary, *map(str, args), *sorted(map(repr, how.items())))
        if key not in self._ones:
            self._ones[key] = trainer.train(args, **how)
        return self._ones[key]

    def many(self, trainer: Trainer, count: int, way: str, args: Args, **how: object) -> Joint:
        return train_ranks(trainer, count, way, args, self.folder, **how)

    def equal(self, trainer: Trainer, count: int, way: str, args: Args, **how: object) -> Joint:
        """Runs `count` ranks and asserts that they give the bits of one process without ZeRO, which
        writes nothing."""
        run = self.many(trainer, count, way, args, **how)
        assert_same_bits(self.one(trainer, without(args, "-z", "-pg", "-o", "-n")), run.first)
        return run


def unchecked(args: Args) -> list[object]:
    """A command without --check-ranks, which would stop ranks that have come apart."""
    return [arg for arg in args if arg != "--check-ranks"]


def without(args: Args, *flags: str) -> list[object]:
    """A command without some flags and their values."""
    found = list(args)
    for flag in flags:
        if flag in found:
            place = found.index(flag)
            del found[place : place + 2]
    return found
