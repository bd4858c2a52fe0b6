"""What the trainer's tests share: run it, read what it prints, make and read its files."""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Mapping, Sequence

import numpy as np

REPO_ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path(__file__).resolve().parent / "reference"

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_MAGIC, TOKEN_VERSION = 20240520, 1
MODEL_MAGIC, MODEL_FP32, MODEL_BF16 = 20240326, 3, 5
DEBUG_MAGIC = 20240327
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
EVAL_MAGIC, EVAL_VERSION = 20240522, 1

# ---------------------------------------------------------------------------------- running it

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
STEP_LINE = re.compile(
    rf"^step\s+(?P<step>\d+)/(?P<of>\d+) \| loss (?P<loss>{NUMBER})(?P<loss_z>[^|]*)"
    rf"\| norm (?P<norm>{NUMBER})(?P<norm_z>[^|]*)\| lr (?P<lr>{NUMBER}) \| (?P<ms>{NUMBER}) ms"
    rf" \| (?P<mfu>[^|]+) \| (?P<tokens>\d+) tok/s(?P<rest>.*)$"
)


@dataclass(frozen=True)
class Step:
    """A step line. loss, norm and lr stay text: equal bits print equal text."""

    step: int
    of: int
    loss: str
    norm: str
    lr: str
    mfu: str
    rest: str

    @property
    def numbers(self) -> tuple[int, str, str, str]:
        """All that must be the same when a run is repeated (times and speeds are not)."""
        return self.step, self.loss, self.norm, self.lr


@dataclass(repr=False)
class Result:
    command: list[str]
    status: int
    stdout: str
    stderr: str
    seconds: float
    steps: list[Step] = field(init=False)

    def __post_init__(self) -> None:
        found = (STEP_LINE.match(line) for line in self.stdout.splitlines())
        self.steps = [
            Step(int(m["step"]), int(m["of"]), m["loss"], m["norm"], m["lr"], m["mfu"], m["rest"])
            for m in found
            if m
        ]

    @property
    def numbers(self) -> list[tuple[int, str, str, str]]:
        return [step.numbers for step in self.steps]

    @property
    def losses(self) -> list[float]:
        return [float(step.loss) for step in self.steps]

    @property
    def hashes(self) -> list[str]:
        """Hashes of all weights, as --hash prints one at the end."""
        return re.findall(r"\bhash ([0-9a-f]{16})$", self.stdout, re.MULTILINE)

    @property
    def hash(self) -> str:
        """The hash at the end."""
        assert self.hashes, f"no hash printed\n{self}"
        return self.hashes[-1]

    @property
    def bits(self) -> str:
        """The line of --hash with the last loss, the last norm and the optimizer's state."""
        found = re.findall(r"^bits .*$", self.stdout, re.MULTILINE)
        assert found, f"no line of bits\n{self}"
        return found[-1]

    @property
    def skipped(self) -> list[int]:
        """Steps whose update was skipped."""
        found = re.findall(r"^step (\d+): update skipped: \S+", self.stdout, re.MULTILINE)
        return [int(step) for step in found]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("warning")]

    @property
    def errors(self) -> list[str]:
        """Lines on stderr that are no warnings."""
        return [line for line in self.stderr.splitlines() if not line.startswith("warning")]

    def val_losses(self) -> list[str]:
        return re.findall(rf"^val loss ({NUMBER})", self.stdout, re.MULTILINE)

    def __str__(self) -> str:
        lines = self.stdout.splitlines()
        stdout = "\n".join(line for line in lines if not line.startswith(("|", "+-")))  # no tables
        return (
            f"$ {' '.join(self.command)}\nstatus {self.status} after {self.seconds:.2f} s\n"
            f"--- stdout\n{stdout}\n--- stderr\n{self.stderr}---"
        )

    __repr__ = __str__


class Trainer:
    """A built trainer. `precision` is fp32 or bf16."""

    def __init__(self, binary: Path, precision: str) -> None:
        self.binary = binary
        self.precision = precision

    def start(
        self,
        args: Sequence[object],
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> subprocess.Popen:
        """The running process, with pipes for stdout and stderr, in a process group of its own."""
        return subprocess.Popen(
            [*prefix, str(self.binary), *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )

    def run(
        self,
        args: Sequence[object],
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> Result:
        """Runs to the end. A run longer than `timeout` seconds is killed and fails the test."""
        begin = time.monotonic()
        process = self.start(args, env, prefix, cwd)
        return finish(process, timeout, begin)

    def train(self, args: Sequence[object], **how) -> Result:
        """Runs and asserts that all went well."""
        result = self.run(args, **how)
        assert result.status == 0, f"expected to succeed\n{result}"
        assert not result.errors, f"expected nothing but warnings on stderr\n{result}"
        return result


def finish(process: subprocess.Popen, timeout: float = 60, begin: float | None = None) -> Result:
    """Waits for a started trainer's end and gathers what it printed."""
    begin = time.monotonic() if begin is None else begin
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        command = " ".join(process.args)
        raise AssertionError(f"no end after {timeout} s: {command}\n{stdout}\n{stderr}") from None
    seconds = time.monotonic() - begin
    return Result(list(process.args), process.returncode, stdout, stderr, seconds)


def wait_until(
    process: subprocess.Popen, condition: Callable[[], bool], timeout: float = 30
) -> None:
    """Waits for something that a started trainer brings about."""
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"ended early\n{finish(process)}"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def wait_for_a_step(process: subprocess.Popen, out: Path) -> None:
    """Until the log in the output folder has one."""
    log = out / "main.log"
    wait_until(process, lambda: log.exists() and "trl:" in log.read_text())


CRASH_WORDS = (
    "core dumped",
    "terminate called",
    "Segmentation fault",
    "Assertion",
    "what():",
    "Traceback",
    "AddressSanitizer",
    "std::",
)


def assert_refused(result: Result, *needles: str) -> None:
    """One clear line on stderr that holds every needle, status 1, no sign of a crash."""
    assert result.status == 1, f"expected status 1\n{result}"
    assert len(result.errors) == 1, f"expected exactly one line on stderr\n{result}"
    for needle in needles:
        assert needle in result.errors[0], f"expected {needle!r} in the message\n{result}"
    for word in CRASH_WORDS:
        assert word not in result.stdout + result.stderr, f"{word!r} in the output\n{result}"


# ----------------------------------------------------------------------------------- its files


def header(*values: int) -> bytes:
    ints = np.zeros(HEADER_INTS, dtype="<i4")
    ints[: len(values)] = values
    return ints.tobytes()


def write_tokens(
    path: Path,
    tokens: Iterable[int],
    magic: int = TOKEN_MAGIC,
    version: int = TOKEN_VERSION,
    count: int | None = None,
) -> Path:
    """A token file. `count` puts another number of tokens into the header than there are."""
    body = np.asarray(tokens, dtype="<u2")
    path.write_bytes(
        header(magic, version, len(body) if count is None else count) + body.tobytes()
    )
    return path


def make_tokens(count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Tokens with something to learn: mostly t -> 5t + 3, else a random token."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, vocab_size, count)
    surprise = rng.random(count) < 0.2
    tokens = np.empty(count, dtype=np.int64)
    token = 0
    for i in range(count):
        token = noise[i] if surprise[i] else (5 * token + 3) % vocab_size
        tokens[i] = token
    return tokens


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    channels: int = 32
    heads: int = 2
    max_seq_len: int = 32
    vocab_size: int = 256

    @property
    def padded_vocab_size(self) -> int:
        return (self.vocab_size + 127) // 128 * 128

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The 16 parameter tensors in the order of the model file."""
        layers, c = self.layers, self.channels
        return {
            "wte": (self.padded_vocab_size, c),
            "wpe": (self.max_seq_len, c),
            "ln1w": (layers, c),
            "ln1b": (layers, c),
            "qkvw": (layers, 3 * c, c),
            "qkvb": (layers, 3 * c),
            "attprojw": (layers, c, c),
            "attprojb": (layers, c),
            "ln2w": (layers, c),
            "ln2b": (layers, c),
            "fcw": (layers, 4 * c, c),
            "fcb": (layers, 4 * c),
            "fcprojw": (layers, c, 4 * c),
            "fcprojb": (layers, c),
            "lnfw": (c,),
            "lnfb": (c,),
        }


def model_header(shape: Shape, version: int = MODEL_FP32, magic: int = MODEL_MAGIC) -> bytes:
    return header(
        magic,
        version,
        shape.max_seq_len,
        shape.vocab_size,
        shape.layers,
        shape.heads,
        shape.channels,
        shape.padded_vocab_size,
    )


def random_weights(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """fp32 weights drawn as GPT-2's are, padding rows 0."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, dims in shape.tensors().items():
        if name in ("ln1w", "ln2w", "lnfw"):
            values = np.ones(dims)
        elif name.endswith("b") and name != "wpe":
            values = np.zeros(dims)
        else:
            values = 0.02 * rng.standard_normal(dims)
        if name == "wte":
            values[shape.vocab_size :] = 0
        weights[name] = values.astype("<f4")
    return weights


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bf16, round to nearest even (finite values)."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def write_model(
    path: Path, shape: Shape, weights: Mapping[str, np.ndarray], version: int = MODEL_FP32
) -> Path:
    """A model file in fp32 (version 3) or bf16 (version 5)."""
    encode = to_bf16 if version == MODEL_BF16 else (lambda values: values.astype("<f4"))
    body = b"".join(encode(weights[name]).tobytes() for name in shape.tensors())
    path.write_bytes(model_header(shape, version) + body)
    return path


def read_model(path: Path) -> tuple[Shape, int, dict[str, np.ndarray]]:
    """A model file's shape, version and weights (as fp32); asserts that nothing else is in it."""
    data = path.read_bytes()
    ints = np.frombuffer(data, dtype="<i4", count=HEADER_INTS)
    assert ints[0] == MODEL_MAGIC, f"{path}: magic {ints[0]}"
    version = int(ints[1])
    assert version in (MODEL_FP32, MODEL_BF16), f"{path}: version {version}"
    max_seq_len, vocab_size, layers, heads, channels, padded = map(int, ints[2:8])
    assert not ints[8:].any(), f"{path}: rest of the header is not zero"
    shape = Shape(layers, channels, heads, max_seq_len, vocab_size)
    assert padded == shape.padded_vocab_size
    body = np.frombuffer(data, dtype="<u2" if version == MODEL_BF16 else "<f4", offset=HEADER_BYTES)
    values = from_bf16(body) if version == MODEL_BF16 else body
    weights, offset = {}, 0
    for name, dims in shape.tensors().items():
        count = math.prod(dims)
        weights[name] = values[offset : offset + count].reshape(dims)
        offset += count
    assert offset == len(values), f"{path}: {len(values)} values, expected {offset}"
    return shape, version, weights


def write_tokenizer(path: Path, vocab_size: int, eot: int) -> Path:
    """A tokenizer file whose token t reads <t>."""
    body = b"".join(
        bytes([len(text)]) + text for text in (f"<{t}>".encode() for t in range(vocab_size))
    )
    path.write_bytes(header(TOKENIZER_MAGIC, TOKENIZER_VERSION, vocab_size, eot) + body)
    return path


def write_eval(path: Path, examples: Sequence[tuple[int, list[int], list[list[int]]]]) -> Path:
    """A HellaSwag file of (label, context tokens, four completions)."""
    bodies = []
    for index, (label, context, completions) in enumerate(examples):
        ints = [index, label, len(completions), len(context), *context]
        for completion in completions:
            ints += [len(completion), *completion]
        size = 2 * (len(ints) + 2)  # the start mark and this number count too
        bodies.append(np.asarray([65535, size, *ints], dtype="<u2").tobytes())
    longest = max(map(len, bodies))
    path.write_bytes(
        header(EVAL_MAGIC, EVAL_VERSION, len(examples), longest) + b"".join(bodies)
    )
    return path


def model_path(folder: Path, step: int) -> Path:
    return folder / f"model_{step:08d}.bin"


def state_path(folder: Path, step: int, rank: int = 0) -> Path:
    return folder / f"state_{step:08d}_{rank:05d}.bin"


def done_path(folder: Path, step: int) -> Path:
    return folder / f"DONE_{step:08d}"


def checkpoints(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    return sorted(int(path.name[len("DONE_") :]) for path in folder.glob("DONE_" + "[0-9]" * 8))


def assert_checkpoint_whole(folder: Path, step: int) -> None:
    """A step that has its DONE file has a readable model and a state too."""
    assert done_path(folder, step).exists()
    read_model(model_path(folder, step))
    assert state_path(folder, step).stat().st_size > HEADER_BYTES


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of everything under a folder, by relative path; -1 for a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name] = (-1, "")
        else:
            data = path.read_bytes()
            found[name] = (len(data), hashlib.sha256(data).hexdigest())
    return found


# ------------------------------------------------------------------------- a small run's command

SHAPE = Shape()
MODEL = "custom:L2C32H2T32V256"  # SHAPE as a descriptor for -e


class Workplace:
    """A folder with token files, and commands for small runs in it.

    A command is flags with their values; args(**) changes single flags: None leaves one out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.train = write_tokens(folder / "train.bin", make_tokens(2001, SHAPE.vocab_size, 1))
        self.val = write_tokens(folder / "val.bin", make_tokens(501, SHAPE.vocab_size, 2))
        self.out = folder / "out"

    def args(self, changes: Mapping[str, object] | None = None, *more: object) -> list[object]:
        """Three steps of two sequences of 16 tokens, without validation, samples and output."""
        flags: dict[str, object] = {
            "-e": MODEL,
            "-i": self.train,
            "-j": self.val,
            "-b": 2,
            "-t": 16,
            "-d": 32,
            "-l": 1e-3,
            "-k": "constant",
            "-x": 3,
            "-v": 0,
            "-s": 0,
        }
        flags.update(changes or {})
        pairs = [pair for pair in flags.items() if pair[1] is not None]
        return [*(part for pair in pairs for part in pair), *more]
