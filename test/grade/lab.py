"""The runs that ./grade judges: checks of single functions, and trainings. Each is made once."""

from __future__ import annotations

import array
import random
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

from launch import LOCALHOST, Ended, Launcher, first_error, free_port

WAYS = ("mpi", "tcp", "fs")
ID_FILE = "ncclUniqueId.sync"
STEPS = 10
# The hosts that ranks 0 ... 3 take themselves to be on; names count up to the first dot.
HOSTS = ("a.x,a.y,a.z,a", "a,b,a,b", "node1.x,node10.x,node1.y,node10", "a,b,c,d", "a,a,b.a,b")


def write_tokens(path: Path, count: int, vocab: int) -> Path:
    """A token file in which a token mostly decides the next one, and small tokens are frequent."""
    draw = random.Random(1)
    tokens, token = array.array("H"), 0
    for _ in range(count):
        token = (5 * token + 3) % vocab
        if draw.random() < 0.3:
            token = min(vocab, int(draw.paretovariate(0.5))) - 1
        tokens.append(token)
    header = array.array("i", [20240520, 1, count] + [0] * 253)
    if sys.byteorder == "big":
        tokens.byteswap()
        header.byteswap()
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


@dataclass(frozen=True)
class Seen:
    """One line of a check: the part, and what was seen by name."""

    part: str
    values: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values.get(name, "")


@dataclass
class Checks:
    """What N processes printed. `seen` has, for each check that all of them completed, every rank's
    lines; `error` is why a check was not completed, by check, or why the processes ended badly."""

    way: str
    count: int
    seen: dict[str, list[list[Seen]]] = field(default_factory=dict)
    error: dict[str, str] = field(default_factory=dict)
    left_behind: bool = False  # fs: the id's file is still there

    def rows(self, check: str, part: str) -> list[tuple[int, Seen]]:
        """The lines of a part, with the rank that printed each."""
        ranks = enumerate(self.seen.get(check, []))
        return [(rank, line) for rank, lines in ranks for line in lines if line.part == part]


@dataclass(frozen=True)
class Training:
    """Ten steps of the trainer. `error` is "" when all went well."""

    count: int
    stage: int
    way: str
    error: str
    losses: list[str]
    ms: list[float]
    bits: list[str]  # loss, norm and hash of the weights of each step, and all hashes at the end
    settled_stage: int
    in_set: bool

    @property
    def name(self) -> str:
        if self.count == 1:
            return "1 rank"
        return f"{self.count} ranks with ZeRO-{self.stage}"

    @property
    def step_ms(self) -> float:
        """Median over the steps after the first three."""
        return statistics.median(self.ms[3:]) if len(self.ms) > 3 else 0.0


def parse_training(ranks: Sequence[Ended], count: int, stage: int, way: str) -> Training:
    text = ranks[0].stdout if count == 1 else "".join(rank.stdout for rank in ranks)
    steps = re.findall(r"^step +\d+/\d+ \| loss (\S+) .* \| ([\d.]+) ms \|", text, re.MULTILINE)
    bits = re.findall(r"^(?:weights of step \d+:|hash|bits) .*$", text, re.MULTILINE)
    stages = re.findall(r"^\| processes +\| \d+, ZeRO stage (\d)", text, re.MULTILINE)
    error = first_error(ranks)
    if not error and len(steps) != STEPS:
        error = f"{len(steps)} steps of {STEPS} were reported"
    return Training(count, stage, way, error, [loss for loss, _ in steps],
                    [float(ms) for _, ms in steps], bits, int(stages[0]) if stages else 0,
                    "bit equality across GPU counts is off" not in text)


class Lab:
    """Where runs are made. `sizes` are the numbers of ranks above one, ascending."""

    def __init__(self, backend: str, trainer: Path, checks: Path, folder: Path,
                 sizes: Sequence[int], has_mpi: bool) -> None:
        self.backend, self.trainer, self.program = backend, trainer, checks
        self.folder, self.sizes, self.has_mpi = folder, list(sizes), has_mpi
        self.launcher = Launcher(folder, 120.0 if backend == "cpu" else 300.0)
        self.start_works: dict[str, bool] = {}  # as far as known
        self._checks: dict[object, Checks] = {}
        self._trainings: dict[object, Training] = {}
        self._data: list[Path] = []

    # ---- single functions

    def checks(self, way: str, count: int, names: Sequence[str]) -> Checks:
        """Runs checks as `count` processes. When one cannot be completed, those after it run anew
        without it, as far as they can."""
        key = (way, count, tuple(names))
        if key in self._checks:
            return self._checks[key]
        result = Checks(way, count)
        pending = list(names)
        while pending:
            ranks = self._run_checks(result, pending)
            for name in pending:
                lines = [_lines_of(name, rank.stdout) for rank in ranks]
                if all(done for done, _ in lines):
                    result.seen[name] = [seen for _, seen in lines]
            missing = [name for name in pending if name not in result.seen]
            error = first_error(ranks)
            if not missing:
                if error:
                    result.error["end"] = error
                break
            result.error[missing[0]] = error or "no result"
            if missing[0] in ("ids", "start"):
                break
            pending = ["start", *missing[1:]] if missing[1:] else []
        self._checks[key] = result
        return result

    def _run_checks(self, result: Checks, names: Sequence[str]) -> list[Ended]:
        way, count = result.way, result.count
        place = self.folder / f"meet_{len(list(self.folder.glob('meet_*')))}"
        place.mkdir()
        if way == "fs":
            # What a killed run may have left, and half of it.
            (place / ID_FILE).write_bytes(random.Random(2).randbytes(137))
        args = [self.program, "--way", way, "--ranks", count, "--folder", place]
        args += ["--port", free_port()] if way == "tcp" else []
        ranks = self.launcher.run(lambda rank: [*args, "--rank", rank, *names], count, way == "mpi")
        result.left_behind = way == "fs" and (place / ID_FILE).exists()
        return ranks

    def local(self) -> Checks:
        """The index of four ranks among those of their host, for several hosts."""
        if "local" not in self._checks:
            hosts = [word for names in HOSTS for word in ("--hosts", names)]
            ranks = self.launcher.run(lambda _: [self.program, *hosts, "local"], 4, mpi=True)
            self._checks["local"] = _without_start("local", ranks)
        return self._checks["local"]

    def shards(self) -> Checks:
        """Shards and ZeRO stages, which need one process alone."""
        if "shards" not in self._checks:
            ranks = self.launcher.run(lambda _: [self.program, "shards"], 1, mpi=False)
            self._checks["shards"] = _without_start("shards", ranks)
        return self._checks["shards"]

    # ---- trainings

    @property
    def ways(self) -> list[str]:
        """The ways to start that work."""
        return [way for way in WAYS if self.start_works.get(way)]

    def data(self) -> list[Path]:
        """Training and validation tokens."""
        if not self._data:
            vocab, count = (256, 1500) if self.backend == "cpu" else (50257, 400_000)
            self._data = [write_tokens(self.folder / name, count, vocab)
                          for name in ("train.bin", "val.bin")]
        return self._data

    def command(self) -> list[object]:
        """The comparison's command without what differs: on GPUs the assignment's, on a CPU that of
        a model of 35 thousand parameters with as many micro-batches."""
        train, val = self.data()
        size = ["-d", 128, "-b", 1, "-t", 16, "-e", "custom:L2C32H2T32V256", "-l", 1e-3]
        if self.backend == "gpu":
            size = ["-d", 32768, "-b", 4, "-t", 1024, "-e", "d12"]
        return [self.trainer, *size, "-x", STEPS, "-i", train, "-j", val, "-v", 0, "-s", 0,
                "--hash", "--check-ranks"]

    def train(self, count: int, stage: int, way: str = "", again: int = 0) -> Training:
        """A training of `count` ranks, started by `way` or the first way that works. `again` tells
        repetitions apart."""
        way = "alone" if count == 1 else way or self.ways[0]
        key = (count, stage, way, again)
        if key not in self._trainings:
            args = [*self.command(), "-z", stage]
            if way in ("tcp", "fs"):
                args += ["-pi", way, "-pn", count, "-pg", 8]
            args += ["-ps", LOCALHOST, "-pp", free_port()] if way == "tcp" else []
            args += ["-pf", self.folder] if way == "fs" else []
            ranks = self.launcher.run(
                lambda rank: [*args, *(["-pr", rank] if way in ("tcp", "fs") else [])], count,
                way == "mpi")
            self._trainings[key] = parse_training(ranks, count, stage, way)
        return self._trainings[key]


def _lines_of(check: str, stdout: str) -> tuple[bool, list[Seen]]:
    """Whether a rank completed a check, and its lines."""
    done, seen = False, []
    for line in stdout.splitlines():
        name, *fields = line.split("\t")
        if name != check or not fields:
            continue
        if fields == ["done"]:
            done = True
        else:
            seen.append(Seen(fields[0], dict(f.split("=", 1) for f in fields[1:] if "=" in f)))
    return done, seen


def _without_start(check: str, ranks: Sequence[Ended]) -> Checks:
    result = Checks("", len(ranks))
    lines = [_lines_of(check, rank.stdout) for rank in ranks]
    if all(done for done, _ in lines) and not first_error(ranks):
        result.seen[check] = [seen for _, seen in lines]
    else:
        result.error[check] = first_error(ranks) or "no result"
    return result
