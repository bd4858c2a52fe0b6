"""How ranks find each other, and how all end when one has an error."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Callable

import pytest

from helpers import (
    HEADER_BYTES,
    SHAPE,
    Trainer,
    assert_refused,
    make_tokens,
    write_tokens,
)
from many_ranks import (
    LOCALHOST,
    WAYS,
    Joint,
    Lab,
    Ranks,
    assert_all_end_well,
    assert_all_refused,
    assert_same_bits,
    connections,
    find_binary,
    free_port,
    listens,
    run_ranks,
    train_ranks,
)

INIT_LIMIT = 2  # seconds
SHORT = {"LLMC_INIT_TIMEOUT_S": str(INIT_LIMIT)}
PATIENT_LIMIT = 6  # where the ranks that there are must meet before it
PATIENT = {"LLMC_INIT_TIMEOUT_S": str(PATIENT_LIMIT)}
LONGER = {"LLMC_INIT_TIMEOUT_S": "20"}  # where all is to go well, also on a busy machine
ID_FILE = "ncclUniqueId.sync"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("starting"))


def short(lab: Lab, steps: int = 3) -> list[object]:
    return lab.args(8, {"-x": steps})


# -------------------------------------------------------------------------- good starts, many times


def start_often(lab: Lab, trainer: Trainer, way: str, times: int) -> None:
    hashes = set()
    for _ in range(times):
        run = train_ranks(trainer, 2, way, short(lab), lab.folder, timeout=60)
        hashes.add(run.first.hash)
    assert hashes == {lab.one(trainer, short(lab)).hash}


@pytest.mark.parametrize("way", WAYS)
def test_llmc_369_two_ranks_three_steps_again_and_again(lab: Lab, bf16: Trainer, way: str) -> None:
    """Twenty and more starts over all three ways."""
    start_often(lab, bf16, way, 7)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nccl_1936_two_hundred_starts(lab: Lab, bf16: Trainer, way: str) -> None:
    start_often(lab, bf16, way, 67)


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)], ids=str)
def test_ranks_that_come_one_after_the_other(
    lab: Lab, bf16: Trainer, way: str, order: tuple[int, ...]
) -> None:
    """Clients try again until rank 0 is there; rank 0 waits for who is late."""
    args = lab.args(6, {"-x": 3})
    with Ranks(bf16, 3, way, args, lab.folder, only=()) as ranks:
        for rank in order:
            ranks.start(rank)
            time.sleep(0.5)
        assert_all_end_well(ranks.wait())


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.1.2.3"])
def test_nccl_1267_addresses(lab: Lab, bf16: Trainer, address: str) -> None:
    init = ["-ps", address, "-pp", free_port()]
    run = train_ranks(bf16, 2, "tcp", short(lab), lab.folder, init=init)
    assert_same_bits(lab.one(bf16, short(lab)), run.first)


def test_nccl_1267_ipv6_address(lab: Lab, bf16: Trainer) -> None:
    """Trains; where there is no IPv6, an error names the address."""
    init = ["-ps", "::1", "-pp", free_port()]
    env = LONGER if has_ipv6() else SHORT
    run = run_ranks(bf16, 2, "tcp", short(lab), lab.folder, init=init, env=env)
    if has_ipv6():
        assert_all_end_well(run)
    else:
        assert_all_refused(run, "-ps ::1")


def test_rank_0_listens_on_the_given_address_alone(lab: Lab, bf16: Trainer) -> None:
    port = free_port()
    init = ["-ps", LOCALHOST, "-pp", port]
    with Ranks(bf16, 2, "tcp", short(lab), lab.folder, init=init, only=[0]) as ranks:
        ranks.wait_until(lambda: listens(LOCALHOST, port))
        assert not listens("127.0.0.2", port), "reachable under another address"
        ranks.start(1)
        assert_all_end_well(ranks.wait())


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("when", ["waiting", "training"])
def test_vllm_15987_pytorch_13865_again_after_kill_9(
    lab: Lab, bf16: Trainer, way: str, when: str, tmp_path: Path
) -> None:
    """The same port, or the same folder: what the dead run has left is not taken for the new one's.
    The client is there before the new rank 0."""
    place = tmp_path / "meet"
    place.mkdir()
    init = ["-ps", LOCALHOST, "-pp", free_port()] if way == "tcp" else ["-pf", place]
    long = lab.args(8, {"-x": 100000})
    only = [0] if when == "waiting" else [0, 1]
    with Ranks(bf16, 2, way, long, lab.folder, init=init, only=only) as ranks:
        if when == "training":
            ranks.wait_for_step(2)
        elif way == "fs":
            ranks.wait_until((place / ID_FILE).exists)
        else:
            ranks.wait_until(lambda: listens(LOCALHOST, int(str(init[3]))))
        ranks.kill()
    with Ranks(bf16, 2, way, short(lab), lab.folder, init=init, only=[1]) as ranks:
        time.sleep(0.5)
        ranks.start(0)
        run = ranks.wait()
    assert_all_end_well(run)
    assert_same_bits(lab.one(bf16, short(lab)), run.first)
    assert_in_time(run, 5)


# ------------------------------------------------------------------------------------- bad starts


def assert_in_time(run: Joint, limit: float) -> None:
    """It ended at a limit of so many seconds, and not at the usual one of five minutes; a busy
    machine may take its time."""
    assert run.seconds < limit + 25, f"took {run.seconds:.1f} s, with a limit of {limit}\n{run}"


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_nccl_289_582_three_of_four_ranks(lab: Lab, bf16: Trainer, way: str) -> None:
    run = run_ranks(bf16, 4, way, short(lab), lab.folder, only=[0, 1, 3], env=PATIENT)
    assert_all_refused(run)
    assert_in_time(run, PATIENT_LIMIT)
    for rank, lines in run.errors.items():
        assert re.search(r"rank 2\b", lines[0]), f"rank {rank} does not name the missing one\n{run}"
    assert sorted(run.errors) == [0, 1, 3], f"{run}"


def test_a_rank_0_that_forgot_its_number_waited_without_a_word(lab: Lab, bf16: Trainer) -> None:
    env = {"LLMC_INIT_TIMEOUT_S": "31"}
    run = run_ranks(bf16, 2, "tcp", lab.args(6, {"-x": 3}), lab.folder, only=[0], env=env)
    note, error = run.errors[0]
    assert re.match(r"note: this process is rank 0 of 2 \(-pr, -pn\) and waits for the others at "
                    r"-ps \S+ -pp \d+, up to 31 s", note), run
    assert "rank 1 of 2 did not arrive" in error, run


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_a_rank_that_dies_while_others_are_awaited(lab: Lab, bf16: Trainer, way: str) -> None:
    """Started again, it takes its place; if not, it is named beside the missing one."""
    args = lab.args(6, {"-x": 3})
    with Ranks(bf16, 3, way, args, lab.folder, only=[0, 1], env=LONGER) as ranks:
        time.sleep(0.5)
        ranks.started[1].kill()
        ranks.started[1].wait()
        ranks.start(1)
        ranks.start(2)
        assert_all_end_well(ranks.wait())
    with Ranks(bf16, 3, way, args, lab.folder, only=[0, 1], env=PATIENT) as ranks:
        time.sleep(1)
        ranks.signal(1, signal.SIGKILL)
        run = ranks.wait()
    assert_in_time(run, PATIENT_LIMIT)
    assert_refused(run.first, "1", "2 of 3", "did not arrive")


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_rank_0_is_missing(lab: Lab, bf16: Trainer, way: str) -> None:
    run = run_ranks(bf16, 3, way, short(lab), lab.folder, only=[1, 2], env=SHORT)
    assert_in_time(run, INIT_LIMIT)
    where = "-ps" if way == "tcp" else "-pf"
    for result in run.ranks.values():
        assert_refused(result, "rank 0", where)


@pytest.mark.parametrize("victim, needles", [
    (0, ["rank 0 at", "no sign of life"]),
    (1, ["LLMC_INIT_TIMEOUT_S", "rank 1 gave no sign of life"]),
])
def test_a_rank_that_is_stopped_in_the_wait_was_not_named(
    lab: Lab, bf16: Trainer, victim: int, needles: list[str]
) -> None:
    """Without rank 0, rank 1 named rank 2, of which rank 0 had told. A stopped rank 1 ends the
    start of NCCL, where the wrong limit was named."""
    with Ranks(bf16, 3, "tcp", short(lab), lab.folder, only=[0, 1], env=PATIENT) as ranks:
        port = int(str(ranks.init[3]))
        ranks.wait_until(lambda: connections(port) >= 1)
        time.sleep(1)
        ranks.signal(victim, signal.SIGSTOP)
        if victim == 1:
            ranks.start(2)
        others = [process for rank, process in ranks.started.items() if rank != victim]
        ranks.wait_until(lambda: all(process.poll() is not None for process in others), 45)
        ranks.signal(victim, signal.SIGKILL)
        run = ranks.wait()
    assert run.ranks.pop(victim).status == -signal.SIGKILL
    assert_all_refused(run, *needles)


def test_an_occupied_port_is_named_in_seconds(lab: Lab, bf16: Trainer) -> None:
    """Another program has it, and answers nothing."""
    with socket.create_server((LOCALHOST, 0)) as other:
        port = other.getsockname()[1]
        init = ["-ps", LOCALHOST, "-pp", port]
        env = {"LLMC_INIT_TIMEOUT_S": "60"}
        with Ranks(bf16, 2, "tcp", short(lab), lab.folder, init=init, env=env, only=[0]) as ranks:
            run = ranks.wait()
        assert_all_refused(run, f"port {port} is in use")
        assert_in_time(run, 5)
        run = run_ranks(bf16, 2, "tcp", short(lab), lab.folder, init=init, env=SHORT, only=[1])
        assert_all_refused(run, f"{LOCALHOST}:{port}", "another program may be listening", "-pp")
        assert_in_time(run, INIT_LIMIT)


def test_no_other_program_is_blamed_where_nobody_listens(lab: Lab, bf16: Trainer) -> None:
    run = run_ranks(bf16, 2, "tcp", short(lab), lab.folder, env=SHORT, only=[1])
    assert_all_refused(run, "Connection refused")
    assert "another program" not in run.error_text, f"{run}"


@pytest.mark.parametrize("address, needle", [
    ("no-such-host.invalid", "no-such-host.invalid"),
    ("", "-ps"),
    ("999.1.1.1", "999.1.1.1"),
    ("203.0.113.7", "203.0.113.7"),  # of no interface here; reserved for documentation
], ids=["unknown", "empty", "no address", "of another machine"])
def test_nccl_1267_bad_addresses(lab: Lab, bf16: Trainer, address: str, needle: str) -> None:
    init = ["-ps", address, "-pp", free_port()]
    run = run_ranks(bf16, 2, "tcp", short(lab), lab.folder, init=init, env=SHORT)
    assert_in_time(run, INIT_LIMIT)
    for result in run.ranks.values():
        assert_refused(result, needle)


BAD_FLAGS = [
    ({"-pn": 2, "-pr": 2}, "-pr 2", "less than -pn"),
    ({"-pn": 2, "-pr": -1}, "-pr -1", ""),
    ({"-pn": 0, "-pr": 0}, "-pn 0", ""),
    ({"-pn": 2, "-pr": 0, "-pg": 0}, "-pg 0", ""),
    ({"-pn": 2, "-pr": 0, "-pp": 70000}, "-pp 70000", "65535"),
    ({"-pn": 2, "-pr": "one"}, "-pr one", ""),
]


@pytest.mark.parametrize("way", ["tcp", "fs"])
@pytest.mark.parametrize("flags, needle, right", BAD_FLAGS, ids=[case[1] for case in BAD_FLAGS])
def test_numbers_out_of_range(
    lab: Lab, bf16: Trainer, tmp_path: Path, way: str, flags: dict, needle: str, right: str
) -> None:
    """One line, at once, before anybody waits for anybody."""
    place = {"-ps": LOCALHOST} if way == "tcp" else {"-pf": tmp_path}
    args = lab.work.args({"-pi": way, **place, **flags})
    result = bf16.run(args, timeout=10)
    assert_refused(result, needle, right)
    assert result.seconds < 2


def test_ranks_that_were_told_different_sizes(lab: Lab, bf16: Trainer) -> None:
    init = ["-pi", "tcp", "-ps", LOCALHOST, "-pp", free_port()]

    def args(rank: int) -> list[object]:
        return [*short(lab), "-pn", (2, 3)[rank], "-pr", rank]

    started = [bf16.start([*args(rank), *init], env=SHORT) for rank in (0, 1)]
    outputs = [process.communicate(timeout=30) for process in started]
    assert [process.returncode for process in started] == [1, 1], f"{outputs}"
    for _, stderr in outputs:
        assert len(stderr.splitlines()) == 1, f"{outputs}"
        assert "one of 2" in stderr and "one of 3" in stderr, f"{outputs}"


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_the_same_rank_twice(lab: Lab, bf16: Trainer, way: str) -> None:
    """One of them is served, the other has an error, and the run goes well."""
    with Ranks(bf16, 2, way, short(lab), lab.folder, env=PATIENT, only=[1]) as first:
        with Ranks(bf16, 2, way, short(lab), lab.folder, env=PATIENT, init=first.init,
                   only=[1]) as second:
            time.sleep(0.3)
            first.start(0)
            runs = first.wait(), second.wait()
    assert runs[0].ranks[0].status == 0, f"{runs}"
    assert sorted(run.ranks[1].status for run in runs) == [0, 1], f"{runs}"
    refused = next(run.ranks[1] for run in runs if run.ranks[1].status == 1)
    assert_refused(refused, "rank")


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_ranks_of_two_jobs_do_not_mix(lab: Lab, bf16: Trainer, way: str) -> None:
    def env(rank: int) -> dict[str, str]:
        return {**SHORT, "LLMC_JOB_TOKEN": f"job-{rank}"}

    run = run_ranks(bf16, 2, way, short(lab), lab.folder, env=env)
    assert_all_refused(run, "rank 1")
    assert_in_time(run, INIT_LIMIT)


def test_two_jobs_in_one_shared_folder(lab: Lab, bf16: Trainer, tmp_path: Path) -> None:
    """Told apart by their tokens, both are served."""

    def start(token: str) -> Ranks:
        env = {**LONGER, "LLMC_JOB_TOKEN": token}
        return Ranks(bf16, 2, "fs", short(lab), lab.folder, env, init=["-pf", tmp_path], only=[0])

    with start("one") as one:
        one.wait_until((tmp_path / ID_FILE).exists)
        with start("two") as two:
            time.sleep(0.3)
            for ranks in (one, two):
                ranks.start(1)
            for ranks in (one, two):
                assert_all_end_well(ranks.wait())
    assert list(tmp_path.iterdir()) == []


def test_llmc_426_632_ranks_without_mpirun_are_no_lone_runs(
    lab: Lab, bf16: Trainer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    args = lab.work.args({"-pn": 2, "-pr": 1, "-o": out})
    assert_refused(bf16.run(args, timeout=20), "mpirun")
    assert not out.exists()


@pytest.fixture(scope="module")
def no_mpi(pytestconfig: pytest.Config) -> Trainer:
    return find_binary(pytestconfig, "nompi/cpu-fp32",
                       "make train_gpt2cpu PRECISION=FP32 NO_USE_MPI=1")


def test_llmc_426_632_mpirun_with_a_build_without_mpi(
    lab: Lab, no_mpi: Trainer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = run_ranks(no_mpi, 2, "mpi", lab.args(8, {"-o": out}), lab.folder)
    assert_all_refused(run, "-pi mpi", "MPI")
    assert not out.exists()
    assert_refused(no_mpi.run(lab.work.args({"-pi": "mpi", "-pn": 2})), "-pi mpi", "MPI")


@pytest.mark.parametrize("way", ["tcp", "fs"])
def test_a_build_without_mpi_trains(lab: Lab, fp32: Trainer, no_mpi: Trainer, way: str) -> None:
    run = train_ranks(no_mpi, 2, way, short(lab), lab.folder)
    assert_same_bits(lab.one(fp32, short(lab)), run.first)


# ------------------------------------------------------------------------------- the shared folder


def test_the_id_file_is_cleaned_up(lab: Lab, bf16: Trainer, tmp_path: Path) -> None:
    train_ranks(bf16, 2, "fs", short(lab), lab.folder, init=["-pf", tmp_path])
    assert list(tmp_path.iterdir()) == []
    run = run_ranks(bf16, 2, "fs", short(lab), lab.folder, init=["-pf", tmp_path], only=[0],
                    env=SHORT)
    assert_all_refused(run, "rank 1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_while_rank_0_waited_left_its_id_file(
    lab: Lab, bf16: Trainer, tmp_path: Path, number: signal.Signals
) -> None:
    """It ends rank 0 all the same."""
    with Ranks(bf16, 2, "fs", short(lab), lab.folder, init=["-pf", tmp_path], only=[0]) as ranks:
        ranks.wait_until((tmp_path / ID_FILE).exists)
        ranks.signal(0, number)
        run = ranks.wait(5)
    assert run.statuses == [-number], f"{run}"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def dead_id(lab: Lab, bf16: Trainer) -> bytes:
    """The id file of a run that was killed."""
    with Ranks(bf16, 2, "fs", short(lab), lab.folder, only=[0]) as ranks:
        file = Path(str(ranks.init[1])) / ID_FILE
        ranks.wait_until(file.exists)
        ranks.kill()
        return file.read_bytes()


BAD_ID_FILES: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda data: random.Random(1).randbytes(len(data)),
    "short random": lambda data: random.Random(2).randbytes(7),
    "128 random": lambda data: random.Random(3).randbytes(128),
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "longer": lambda data: data + bytes(100),
    "flipped bit": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
    "of a dead run": lambda data: data,
}


@pytest.mark.parametrize("name", BAD_ID_FILES)
def test_pytorch_13865_bad_id_file(
    lab: Lab, bf16: Trainer, dead_id: bytes, tmp_path: Path, name: str
) -> None:
    """A client that finds it waits for a better one."""
    (tmp_path / ID_FILE).write_bytes(BAD_ID_FILES[name](dead_id))
    with Ranks(bf16, 2, "fs", short(lab), lab.folder, init=["-pf", tmp_path], only=[1]) as ranks:
        time.sleep(0.2)
        assert ranks.started[1].poll() is None, f"{ranks.wait()}"
        ranks.start(0)
        assert_all_end_well(ranks.wait())


def test_an_id_file_that_nobody_replaces(
    lab: Lab, bf16: Trainer, dead_id: bytes, tmp_path: Path
) -> None:
    (tmp_path / ID_FILE).write_bytes(dead_id)
    run = run_ranks(bf16, 2, "fs", short(lab), lab.folder, init=["-pf", tmp_path], only=[1],
                    env=SHORT)
    assert_all_refused(run, "-pf", str(tmp_path))
    assert_in_time(run, INIT_LIMIT)
    assert (tmp_path / ID_FILE).read_bytes() == dead_id, "removed what is not its own"


@pytest.mark.parametrize("what", ["missing", "a file", "empty"])
def test_bad_shared_folder(lab: Lab, bf16: Trainer, tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    if what == "a file":
        place.touch()
    init = ["-pf", "" if what == "empty" else place]
    run = run_ranks(bf16, 2, "fs", short(lab), lab.folder, init=init, env=SHORT)
    assert_in_time(run, INIT_LIMIT)
    for result in run.ranks.values():
        assert_refused(result, "-pf", str(init[1]))


# ------------------------------------------------------------------------------ an attack on tcp


@pytest.fixture(scope="module")
def hello(lab: Lab, bf16: Trainer) -> bytes:
    """What rank 1 of 3 says first to whoever listens on rank 0's port."""
    with socket.create_server((LOCALHOST, 0)) as server:
        server.settimeout(20)
        init = ["-ps", LOCALHOST, "-pp", server.getsockname()[1]]
        with Ranks(bf16, 3, "tcp", short(lab), lab.folder, init=init, only=[1], env=SHORT):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(5)
                return connection.recv(4096)


def junk(hello: bytes, number: int) -> bytes:
    rng = random.Random(number)
    flipped = bytearray(hello)
    flipped[rng.randrange(8)] ^= 1 << rng.randrange(8)  # magic and version
    return [
        b"", rng.randbytes(5), rng.randbytes(4096), bytes(1000), b"GET / HTTP/1.1\r\n\r\n",
        hello[: len(hello) // 2], hello[:-1], hello[:1], bytes(flipped), b"\xff" * len(hello),
    ][number % 10]


class Attacker(threading.Thread):
    """Connects, sends, then half-closes, closes or stays silent; keeps what it receives."""

    def __init__(self, port: int, data: bytes, end: str) -> None:
        super().__init__(daemon=True)
        self.port, self.data, self.end = port, data, end
        self.received = b""
        self.connected = threading.Event()
        self.finish = threading.Event()

    def run(self) -> None:
        try:
            with socket.create_connection((LOCALHOST, self.port), timeout=5) as connection:
                self.connected.set()
                connection.sendall(self.data)
                if self.end == "half-close":
                    connection.shutdown(socket.SHUT_WR)
                if self.end == "close":
                    return
                connection.settimeout(0.1)
                while not self.finish.is_set():
                    try:
                        piece = connection.recv(4096)
                    except TimeoutError:
                        continue
                    if not piece:
                        return
                    self.received += piece
        except OSError:
            pass  # dropped
        finally:
            self.connected.set()


def test_fifty_connections_of_junk_while_rank_0_waits(
    lab: Lab, bf16: Trainer, hello: bytes
) -> None:
    """The real ranks are served soon, also while silent connections stay open; none of the others
    receives as much as an id."""
    port = free_port()
    init = ["-ps", LOCALHOST, "-pp", port]
    args = lab.args(24, {"-x": 3})
    with Ranks(bf16, 4, "tcp", args, lab.folder, init=init, only=[0]) as ranks:
        ranks.wait_until(lambda: listens(LOCALHOST, port))
        ends = ("half-close", "close", "silence", "silence", "silence")
        attackers = [Attacker(port, junk(hello, i), ends[i % 5]) for i in range(50)]
        for attacker in attackers[:25]:
            attacker.start()
        assert all(attacker.connected.wait(20) for attacker in attackers[:25])
        ranks.start(1)
        for attacker in attackers[25:]:
            attacker.start()
        ranks.start(2)
        ranks.start(3)
        begin = time.monotonic()
        run = ranks.wait(60)
        assert time.monotonic() - begin < 45, f"{run}"  # not the patience with each, one by one
        for attacker in attackers:
            attacker.finish.set()
            attacker.join(10)
    assert_all_end_well(run)
    assert_same_bits(lab.one(bf16, args), run.first)
    most = max(len(attacker.received) for attacker in attackers)
    assert most < 128, f"an attacker received {most} bytes: as many as an id has"


# ---------------------------------------------------------------------------- errors of one rank


@pytest.mark.parametrize("flag, value", [
    ("-l", 2e-3), ("-x", 11), ("-rs", 7), ("-w", 0), ("-rw", 4), ("-d", 256), ("-b", 2), ("-z", 1),
    ("-e", "custom:L2C64H2T32V256"), ("-v", 5),
])
def test_flags_that_differ_between_ranks(
    lab: Lab, bf16: Trainer, tmp_path: Path, flag: str, value: object
) -> None:
    out = tmp_path / "out"
    def args(rank: int) -> list[object]:
        return lab.args(8, {"-o": out, "-n": 5, **({flag: value} if rank == 1 else {})})

    run = run_ranks(bf16, 2, "tcp", args, lab.folder)
    assert_all_refused(run, flag)
    assert not out.exists(), "written in spite of the error"


@pytest.mark.parametrize("flag, value", [("-b", 0), ("-pn", 3)])
def test_wrong_flags_of_all_ranks_are_said_once(
    lab: Lab, bf16: Trainer, flag: str, value: int
) -> None:
    """By rank 0, whether the ranks have met MPI (-pn) or not."""
    run = run_ranks(bf16, 4, "mpi", lab.args(8, {flag: value}), lab.folder)
    assert_all_refused(run, f"{flag} {value}")
    assert sorted(run.errors) == [0], f"{run}"


@pytest.mark.parametrize("env", [{}, {"LLMC_INIT_TIMEOUT_S": "soon"}], ids=["flag", "environment"])
def test_an_error_of_a_higher_rank_alone_was_not_said(lab: Lab, bf16: Trainer, env: dict) -> None:
    def args(rank: int) -> list[object]:
        return lab.args(8, {"-b": 0} if rank == 2 and not env else {})

    run = run_ranks(bf16, 4, "mpi", args, lab.folder, env=lambda rank: env if rank == 2 else {})
    assert_all_refused(run, "rank 2: LLMC_INIT_TIMEOUT_S=soon" if env else "rank 2: -b 0")
    assert sorted(run.errors) == [2], f"{run}"
    assert_in_time(run, 10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["missing", "short", "bad token", "other length",
                                  "other token"])
def test_data_that_one_rank_alone_sees_as_bad(
    lab: Lab, bf16: Trainer, tmp_path: Path, way: str, what: str
) -> None:
    """Each rank runs in a folder of its own, as on machines of their own, with the same command."""
    for rank in range(2):
        place = tmp_path / str(rank)
        place.mkdir()
        tokens = make_tokens(2001, SHAPE.vocab_size, 1)
        if rank == 1 and what == "bad token":
            tokens[1500] = 300
        if rank == 1 and what == "other token":
            tokens[1500] = (tokens[1500] + 1) % SHAPE.vocab_size
        if rank == 1 and what == "other length":
            tokens = tokens[:1800]
        data = write_tokens(place / "data.bin", tokens)
        if rank == 1 and what == "missing":
            data.unlink()
        if rank == 1 and what == "short":
            os.truncate(data, HEADER_BYTES + 1000)
    out = tmp_path / "out"
    args = lab.args(8, {"-i": "data.bin", "-o": out})
    run = run_ranks(bf16, 2, way, args, lab.folder,
                    prefix=lambda rank: ["env", "-C", str(tmp_path / str(rank))])
    assert_all_refused(run, "-i" if what.startswith("other") else "data.bin")
    assert_in_time(run, 10)
    assert not out.exists(), "written in spite of the error"


@pytest.mark.parametrize("way", WAYS)
def test_data_that_one_rank_cannot_read_any_more(
    lab: Lab, bf16: Trainer, tmp_path: Path, way: str
) -> None:
    """In mid-training: the others wait for this rank, and are told why in vain."""
    for rank in range(3):
        place = tmp_path / str(rank)
        place.mkdir()
        shutil.copy(lab.work.train, place / "data.bin")
    args = lab.args(6, {"-i": "data.bin", "-x": 1000000})
    with Ranks(bf16, 3, way, args, lab.folder,
               prefix=lambda rank: ["env", "-C", str(tmp_path / str(rank))]) as ranks:
        ranks.wait_for_step(3)
        os.truncate(tmp_path / "2" / "data.bin", HEADER_BYTES)
        begin = time.monotonic()
        run = ranks.wait(30)
    assert time.monotonic() - begin < 10, f"{run}"
    assert_all_refused(run, "rank 2", "data.bin")


def test_bad_input_that_all_ranks_see_is_said_once(lab: Lab, bf16: Trainer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = run_ranks(bf16, 3, "tcp", lab.args(6, {"-i": tmp_path / "none.bin", "-o": out}),
                    lab.folder)
    assert_all_refused(run, "none.bin")
    assert not out.exists()


def test_llmc_727_same_message_for_any_number_of_ranks(lab: Lab, bf16: Trainer) -> None:
    """A validation file of 31 windows and -b 64: needed, available, largest B."""
    lines = set()
    for count in (1, 2, 4):
        args = lab.args(8, {"-b": 64, "-d": 64 * 16 * 8, "-i": lab.work.val})
        run = run_ranks(bf16, count, "tcp", args, lab.folder)
        assert_all_refused(run, "64", "31")
        lines.add(re.sub(r"^rank \d+: ", "", run.errors[min(run.errors)][0]))
    assert len(lines) == 1, f"{lines}"
