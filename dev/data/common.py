"""Shared parts of the data scripts: token files, the GPT-2 encoder, the tokenizer file.

All integers on disk are little endian. A token file is a header of 256 int32 (magic, version,
number of tokens, zeros) followed by uint16 tokens.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO, TypeVar

# The scripts take these from here. Parser says what is missing, after --help.
missing_package: str | None = None
try:
    import numpy as np
    import requests
    import tiktoken
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    missing_package = missing.name
    np = requests = tiktoken = tqdm = None

REPO_ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = Path(__file__).resolve().parent
DEFAULT_CACHE = DATA_DIR / "gpt2"
DEFAULT_TOKENIZER = REPO_ROOT / "gpt2_tokenizer.bin"

HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
TOKEN_MAGIC, TOKEN_VERSION = 20240520, 1
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2

EOT = 50256  # <|endoftext|>
VOCAB_SIZE = 50257
EOT_BYTES = b"<|endoftext|>"

# How GPT-2 cuts text into words before merging bytes (Radford et al. 2019, section 2.2, and the
# published encoder).
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

Item = TypeVar("Item")
Result = TypeVar("Result")


class DataError(Exception):
    """An error the user can act on; its text is one line."""


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main; every expected error becomes one line on stderr and status 1."""
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(f"error: {where}{error.strerror or error}")
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        sys.exit(130)


def sha256_of(data: bytes) -> str:
    """SHA-256 of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------
# Files that are either whole or not there


class AtomicFile:
    """A file under a temporary name beside `path`: `commit` makes it `path`, `abort` removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp.part")
        self.file: BinaryIO = open(self._temporary, "wb")

    def commit(self) -> None:
        """Forces the bytes to disk and renames the file into place."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._temporary, self.path)
        fsync_folder(self.path.parent)

    def abort(self) -> None:
        """Drops what was written; after `commit` it does nothing."""
        self.file.close()
        self._temporary.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file atomically."""
    target = AtomicFile(path)
    try:
        target.file.write(data)
        target.commit()
    finally:
        target.abort()


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads a JSON file; None when it is not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path}: not a JSON file ({error})") from None


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file to read; bytes that are not UTF-8 are an error of the data."""
    try:
        with open(path, encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text file in UTF-8") from None


# ----------------------------------------------------------------------------------------------
# Token files


def make_header(*values: int) -> bytes:
    """256 int32: the given values, then zeros."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[: len(values)] = values
    return header.tobytes()


class TokenFileWriter:
    """Writes one token file piece by piece; `close` gives it its name, `abort` removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._target = AtomicFile(path)
        self._target.file.write(make_header(TOKEN_MAGIC, TOKEN_VERSION, 0))

    def append(self, tokens: np.ndarray) -> None:
        """Adds tokens: a 1-D uint16 array."""
        self._target.file.write(np.ascontiguousarray(tokens, dtype="<u2").tobytes())
        self.count += len(tokens)

    def close(self) -> None:
        """Fills in the number of tokens and renames the file into place."""
        if self.count > 2**31 - 1:
            raise DataError(f"{self.path}: {self.count} tokens do not fit the header's int32")
        self._target.file.seek(0)
        self._target.file.write(make_header(TOKEN_MAGIC, TOKEN_VERSION, self.count))
        self._target.commit()

    def abort(self) -> None:
        """Drops what was written; after `close` it does nothing."""
        self._target.abort()


def write_token_file(path: Path, tokens: np.ndarray) -> None:
    """Writes a whole token file; tokens is a 1-D uint16 array."""
    writer = TokenFileWriter(path)
    try:
        writer.append(tokens)
        writer.close()
    finally:
        writer.abort()


def read_token_file(path: Path) -> np.ndarray:
    """Reads a token file back as a uint16 array; checks magic, version and size."""
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        raise DataError(f"{path}: {len(data)} bytes, shorter than a header of {HEADER_BYTES}")
    header = np.frombuffer(data[:HEADER_BYTES], dtype="<i4")
    if header[0] != TOKEN_MAGIC or header[1] != TOKEN_VERSION:
        raise DataError(
            f"{path}: magic {header[0]} version {header[1]},"
            f" expected {TOKEN_MAGIC} version {TOKEN_VERSION}"
        )
    tokens = np.frombuffer(data[HEADER_BYTES:], dtype="<u2")
    if len(tokens) != header[2]:
        raise DataError(f"{path}: header says {header[2]} tokens, the file has {len(tokens)}")
    return tokens


# ----------------------------------------------------------------------------------------------
# GPT-2's vocabulary


def gpt2_byte_order() -> list[int]:
    """The 256 byte values in the order of GPT-2's tokens 0 ... 255.

    First come the bytes that Latin-1 shows as a visible character, then all others.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return visible + [byte for byte in range(256) if byte not in set(visible)]


def parse_ranks(data: bytes, name: str = "merge ranks") -> dict[bytes, int]:
    """Reads merge ranks in tiktoken's text form: a base64 token and its rank on each line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{name}: line {number} is not 'base64 rank'") from None
    return ranks


def format_ranks(tokens: Iterable[bytes]) -> bytes:
    """The inverse of parse_ranks, for tokens in rank order."""
    return b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens))


def ranks_from_vocab_bpe(text: str) -> bytes:
    """Turns OpenAI's vocab.bpe (Hugging Face: merges.txt) into tiktoken's text form.

    vocab.bpe writes bytes as visible characters: a visible Latin-1 byte as itself, the n-th other
    byte as the character 256 + n.
    """
    order = gpt2_byte_order()
    byte_of = {chr(b if i < 188 else 256 + i - 188): b for i, b in enumerate(order)}
    tokens = [bytes([byte]) for byte in order]
    for line in text.splitlines():
        if not line.strip() or line.startswith("#version"):
            continue
        try:
            left, right = line.split(" ")
            tokens.append(bytes(byte_of[character] for character in left + right))
        except (ValueError, KeyError):
            raise DataError(f"vocab.bpe: not a merge of two tokens: {line!r}") from None
    return format_ranks(tokens)


class Gpt2Encoder:
    """GPT-2's byte pair encoding over local merge ranks: nothing is ever downloaded here."""

    def __init__(self, ranks: bytes) -> None:
        table = parse_ranks(ranks)
        if sorted(table.values()) != list(range(EOT)):
            raise DataError(f"merge ranks: {len(table)} tokens, GPT-2 has ranks 0 ... {EOT - 1}")
        self.entries: list[bytes] = sorted(table, key=lambda token: table[token]) + [EOT_BYTES]
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=table,
            special_tokens={EOT_BYTES.decode(): EOT},
            explicit_n_vocab=VOCAB_SIZE,
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; '<|endoftext|>' inside it is plain text."""
        return self._encoding.encode_ordinary(text)


class ByteEncoder:
    """One token a byte, with GPT-2's numbers for the 256 bytes and for <|endoftext|>.

    The last resort when no merge ranks can be had: the same model and tokenizer file fit. Tokens
    that it never makes decode to U+FFFD, so that a sampler shows them.
    """

    def __init__(self) -> None:
        order = gpt2_byte_order()
        self._token_of = {byte: token for token, byte in enumerate(order)}
        unused = "\N{REPLACEMENT CHARACTER}".encode()
        self.entries: list[bytes] = [bytes([byte]) for byte in order]
        self.entries += [unused] * (EOT - len(order)) + [EOT_BYTES]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text: its UTF-8 bytes."""
        return [self._token_of[byte] for byte in text.encode()]


Encoder = Gpt2Encoder | ByteEncoder


def encode_documents(encoder: Encoder, texts: Iterable[str]) -> np.ndarray:
    """Tokens of all texts as one uint16 array, each text preceded by <|endoftext|>."""
    tokens: list[int] = []
    for text in texts:
        tokens.append(EOT)
        tokens.extend(encoder.encode(text))
    return np.array(tokens, dtype=np.uint16)


def tokenizer_bytes(entries: Sequence[bytes]) -> bytes:
    """Contents of gpt2_tokenizer.bin: header, then a length byte and the bytes of each token."""
    if len(entries) != VOCAB_SIZE or entries[EOT] != EOT_BYTES:
        raise DataError(f"tokenizer: {len(entries)} entries, expected {VOCAB_SIZE}")
    longest = max(len(entry) for entry in entries)
    if longest > 255:
        raise DataError(f"tokenizer: a token of {longest} bytes does not fit a length byte")
    body = b"".join(bytes([len(entry)]) + entry for entry in entries)
    return make_header(TOKENIZER_MAGIC, TOKENIZER_VERSION, VOCAB_SIZE, EOT) + body


# ----------------------------------------------------------------------------------------------
# Several processes

_worker_encoder: Gpt2Encoder | None = None


def set_worker_encoder(ranks: bytes) -> None:
    """Gives this process the encoder that encode_in_worker uses."""
    global _worker_encoder
    _worker_encoder = Gpt2Encoder(ranks)


def start_worker(ranks: bytes) -> None:
    """set_worker_encoder in a pool's process, where Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_worker_encoder(ranks)


def encode_in_worker(texts: list[str]) -> np.ndarray:
    """encode_documents with this process's encoder."""
    if _worker_encoder is None:
        raise DataError("encode_in_worker: set_worker_encoder was not called in this process")
    return encode_documents(_worker_encoder, texts)


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], ranks: bytes, workers: int
) -> Generator[Result, None, None]:
    """Yields function(item) in the order of the items, computed in `workers` processes.

    Only a few items a worker are read ahead, so that a long stream never fills the memory. The
    result does not depend on the number of workers.
    """
    if workers <= 1:
        set_worker_encoder(ranks)
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=start_worker,
        initargs=(ranks,),
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker process died (out of memory?); try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """Processes to tokenise with: the cores this process may use, less one for reading."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def positive_int(text: str) -> int:
    """argparse type: a whole number of at least 1; underscores may group its digits."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return value


class Parser(argparse.ArgumentParser):
    """argparse, except that a wrong command line is one line on stderr and status 1."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"error: {message} (see --help)\n")

    def parse_args(self, *arguments: Any) -> argparse.Namespace:
        """Ends the script, too, where a package is missing."""
        args = super().parse_args(*arguments)
        if missing_package:
            sys.exit(
                f"error: Python package '{missing_package}' is missing;"
                f" run: {sys.executable} -m pip install numpy requests tiktoken tqdm"
            )
        for option in ("out", "cache"):
            if getattr(args, option, None) is not None:
                self.check_folder(f"--{option}", getattr(args, option))
        return args

    def check_folder(self, option: str, folder: Path, file: Path | None = None) -> None:
        """An error when it is not a folder, and cannot be made; `file` is to be in it."""
        given, wanted = (file, "a file in a folder") if file else (folder, "a folder")
        there = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
        if not there.is_dir():
            self.error(f"{option} {given}: expected {wanted}, and {there} is none")
        if there != folder and not os.access(there, os.W_OK):
            self.error(f"{option} {given}: expected {wanted}, and {there} cannot be written to")

    def check_output_file(self, option: str, path: Path) -> None:
        """An error when it is a folder, or when its own folder cannot be made."""
        if path.is_dir():
            self.error(f"{option} {path}: a folder, expected a file")
        self.check_folder(option, path.parent, path)

    def check_input(self, paths: Iterable[Path]) -> None:
        """An error for the first of --input's files that is not there, is a folder or is repeated.

        Text that stands twice would be in both validation and training.
        """
        seen: dict[tuple[int, int], Path] = {}
        for path in paths:
            if not path.exists():
                self.error(f"--input {path}: no such file")
            if path.is_dir():
                self.error(f"--input {path}: a folder, expected a file")
            status = path.stat()
            first = seen.setdefault((status.st_dev, status.st_ino), path)
            if first is not path:
                self.error(f"--input {path}: the same file as {first}; expected each file once")


def add_encoding_options(parser: Parser) -> None:
    """The options that every tokenising script has."""
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        metavar="DIR",
        help="where GPT-2's merge ranks (0.8 MB) are kept (default: dev/data/gpt2)",
    )


def add_worker_option(parser: Parser) -> None:
    """The number of tokenising processes."""
    parser.add_argument(
        "--workers",
        type=positive_int,
        default=default_workers(),
        metavar="N",
        help="tokenising processes (default: %(default)s here); the files do not depend on it",
    )
