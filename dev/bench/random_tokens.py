"""A token file of random tokens, for timing and checks where no data set is at hand.

    python3 dev/bench/random_tokens.py FILE [COUNT]

Token frequencies fall as in text (Zipf's law), so that a model has something to learn and the
embedding's gradient meets frequent tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import numpy as np
except ModuleNotFoundError:
    sys.exit("error: Python package 'numpy' is missing; make setup has it in .venv/bin/python")

TOKEN_MAGIC, TOKEN_VERSION, HEADER_INTS = 20240520, 1, 256
VOCAB = 50257
EXPONENT = 1.2


def write_random_tokens(path: Path, count: int, vocab: int = VOCAB) -> Path:
    """Writes `count` tokens, always the same ones, and returns the path."""
    rng = np.random.default_rng(1)
    tokens = (rng.zipf(EXPONENT, count) - 1) % vocab
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = TOKEN_MAGIC, TOKEN_VERSION, count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit((__doc__ or "").strip())
    write_random_tokens(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 1 << 20)
