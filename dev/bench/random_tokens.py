"""A token file of random tokens, for timing and checks where no data set is at hand.

    python3 dev/bench/random_tokens.py FILE [COUNT]

Token frequencies fall as in text (Zipf's law), so that a model has something to learn and the
embedding's gradient meets frequent tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Callable

TOKEN_MAGIC, TOKEN_VERSION, HEADER_INTS = 20240520, 1, 256
VOCAB = 50257
EXPONENT = 1.2
MOST_TOKENS = 2**31 - 1  # the header's int32


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """argparse type: a whole number within bounds."""
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {bounds}")
        return value

    return read


def check_data(parser: argparse.ArgumentParser, data: str | None, root: Path = Path()) -> None:
    """An error when --data, as seen from `root`, is not a token file; None is for random tokens."""
    if data is None:
        return
    path = root / data
    if not path.is_file():
        parser.error(f"--data {data}: no such file; expected a token file"
                     + ("" if path == Path(data) else f", and {path} was looked for"))
    try:
        with open(path, "rb") as file:
            header = file.read(4 * HEADER_INTS)
    except OSError as error:
        parser.error(f"--data {data}: {error.strerror}")
    magic = int.from_bytes(header[:4], "little")
    if len(header) < 4 * HEADER_INTS or magic != TOKEN_MAGIC:
        parser.error(f"--data {data}: not a token file; expected one that starts with a header of "
                     f"{HEADER_INTS} int32 and magic {TOKEN_MAGIC}")


def write_random_tokens(path: Path, count: int, vocab: int = VOCAB) -> Path:
    """Writes `count` tokens, always the same ones, and returns the path."""
    try:  # here, so that --help of all scripts goes without
        import numpy as np
    except ModuleNotFoundError:
        raise SystemExit("error: Python package 'numpy' is missing; make setup has it in "
                         ".venv/bin/python") from None
    rng = np.random.default_rng(1)
    tokens = (rng.zipf(EXPONENT, count) - 1) % vocab
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = TOKEN_MAGIC, TOKEN_VERSION, count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", metavar="FILE", type=Path, help="what to write")
    parser.add_argument("count", metavar="COUNT", type=whole_number(1, MOST_TOKENS), nargs="?",
                        default=1 << 20, help="tokens (default: %(default)s)")
    args = parser.parse_args()
    try:
        write_random_tokens(args.file, args.count)
    except OSError as error:
        raise SystemExit(f"error: {args.file}: {error.strerror}") from None
    except MemoryError:
        raise SystemExit(f"error: COUNT {args.count}: more than this machine's memory takes; "
                         "expected fewer tokens") from None


if __name__ == "__main__":
    main()
