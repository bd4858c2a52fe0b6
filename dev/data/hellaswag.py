"""Writes the HellaSwag validation set (Zellers et al. 2019) for the trainer's evaluation.

Makes dev/data/hellaswag/hellaswag_val.bin: 10,042 examples, about 7 MB (download 12 MB).

File: a header of 256 int32 (magic 20240522, version 1, number of examples, bytes of the longest
example), then for each example, in uint16: 65535, bytes of this example, its index, its label,
number of completions (4), context length, context tokens, and for each completion its length and
its tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common import (
    DATA_DIR,
    DataError,
    Encoder,
    Parser,
    add_encoding_options,
    make_header,
    np,
    open_text,
    run_script,
    tqdm,
    write_bytes,
)
from download import download
from sources import require_encoder

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
EVAL_MAGIC, EVAL_VERSION = 20240522, 1
START_OF_EXAMPLE = 65535
COMPLETIONS = 4


@dataclass(frozen=True)
class Example:
    """One context with its four endings, of which `label` is the right one."""

    context: str
    endings: list[str]
    label: int


def parse_example(line: str, where: str) -> Example:
    """Reads one line of hellaswag_val.jsonl."""
    try:
        entry = json.loads(line)
        example = Example(str(entry["ctx"]), list(entry["endings"]), int(entry["label"]))
        if not all(isinstance(ending, str) for ending in example.endings):
            raise TypeError
    except (ValueError, KeyError, TypeError, OverflowError):
        raise DataError(f"{where}: expected JSON with 'ctx', 'endings' and 'label'") from None
    if len(example.endings) != COMPLETIONS or not 0 <= example.label < COMPLETIONS:
        raise DataError(
            f"{where}: {len(example.endings)} endings, label {example.label};"
            f" expected {COMPLETIONS} endings and a label from 0 to {COMPLETIONS - 1}"
        )
    return example


def read_examples(paths: Iterable[Path]) -> Iterator[Example]:
    """All examples of the files, in order."""
    for path in paths:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse_example(line, f"{path}:{number}")


def encode_example(encoder: Encoder, index: int, example: Example) -> np.ndarray:
    """The example's uint16 as they stand in the file."""
    context = encoder.encode(example.context)
    values = [START_OF_EXAMPLE, 0, index, example.label, COMPLETIONS, len(context), *context]
    for ending in example.endings:
        # GPT-2's tokens carry the space in front of a word.
        tokens = encoder.encode(" " + ending)
        values += [len(tokens), *tokens]
    values[1] = 2 * len(values)
    if max(values[1], index) > START_OF_EXAMPLE - 1:
        raise DataError(f"example {index}: {values[1]} bytes or its index do not fit uint16")
    return np.array(values, dtype="<u2")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=DATA_DIR / "hellaswag",
        metavar="DIR",
        help="output folder, 20 MB with the download (default: dev/data/hellaswag)",
    )
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="hellaswag_val.jsonl (12 MB), already downloaded",
    )
    add_encoding_options(parser)
    args = parser.parse_args()
    parser.check_input(args.input or [])
    return args


def main() -> None:
    """Downloads if need be, then writes hellaswag_val.bin."""
    args = parse_arguments()
    paths = args.input or [download(URL, args.out / "hellaswag_val.jsonl")]
    encoder = require_encoder(args.cache)
    examples = tqdm(read_examples(paths), desc="tokenising", unit=" examples", disable=None)
    encoded = [encode_example(encoder, i, example) for i, example in enumerate(examples)]
    if not encoded:
        raise DataError(f"{paths[0]}: no examples in it")
    longest = max(values.nbytes for values in encoded)
    header = make_header(EVAL_MAGIC, EVAL_VERSION, len(encoded), longest)
    path = args.out / "hellaswag_val.bin"
    write_bytes(path, header + b"".join(values.tobytes() for values in encoded))
    print(f"wrote {path}: {len(encoded)} examples, the longest has {longest} bytes")


if __name__ == "__main__":
    run_script(main)
