"""Writes TinyStories (Eldan and Li 2023) as GPT-2 tokens.

Makes, in dev/data/tinystories:
  TinyStories_train.bin   about 925 M tokens, 1.9 GB
  TinyStories_val.bin     about  19 M tokens, 40 MB (the first of the 50 source files)
Downloads 1.5 GB (resumable), from which the stories are read without unpacking to disk.
Each story is preceded by <|endoftext|>.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from common import (
    DATA_DIR,
    DataError,
    Parser,
    TokenFileWriter,
    add_encoding_options,
    add_worker_option,
    encode_in_worker,
    np,
    ordered_map,
    run_script,
    tqdm,
)
from download import download
from sources import require_ranks

URL = (
    "https://huggingface.co/datasets/roneneldan/TinyStories"
    "/resolve/main/TinyStories_all_data.tar.gz"
)
ARCHIVE = "TinyStories_all_data.tar.gz"
STORIES_A_PIECE = 2000

Piece = list[str]


def parse_stories(data: bytes, name: str) -> list[str]:
    """The stories of one source file: a JSON list of objects with a 'story'."""
    try:
        return [entry["story"].strip() for entry in json.loads(data)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{name}: expected a JSON list of objects with a 'story'") from None


def read_archive(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and stories of each data*.json in the archive, sorted by name."""
    try:
        with tarfile.open(path) as archive:
            members = {Path(m.name).name: m for m in archive if m.name.endswith(".json")}
            for name in sorted(members):
                member = archive.extractfile(members[name])
                if member is None:
                    raise DataError(f"{path}: {name} is not a plain file")
                yield name, parse_stories(member.read(), f"{path}: {name}")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        # tarfile's text goes on with a line for each way of compression that it has tried.
        reason = str(error).partition("\n")[0].rstrip(":")
        raise DataError(f"{path}: not a readable tar archive ({reason})") from None


def read_sources(paths: list[Path]) -> Iterator[tuple[str, list[str]]]:
    """Name and stories of each source file; archives stand for the files inside them."""
    for path in paths:
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            yield from read_archive(path)
        else:
            yield path.name, parse_stories(path.read_bytes(), str(path))


def read_pieces(paths: list[Path], bar: tqdm) -> Iterator[tuple[bool, Piece]]:
    """All stories in order, in pieces; the flag is True for those of the first source file."""
    for number, (name, stories) in enumerate(read_sources(paths)):
        bar.set_postfix_str(name)
        for start in range(0, len(stories), STORIES_A_PIECE):
            yield number == 0, stories[start : start + STORIES_A_PIECE]


def encode_piece(piece: tuple[bool, Piece]) -> tuple[bool, int, np.ndarray]:
    """Runs in a worker: (is validation, number of stories, tokens)."""
    return piece[0], len(piece[1]), encode_in_worker(piece[1])


def tokenise(paths: list[Path], out: Path, ranks: bytes, workers: int) -> None:
    """Writes both token files; the first source file is validation, the others training."""
    writers = {
        True: TokenFileWriter(out / "TinyStories_val.bin"),
        False: TokenFileWriter(out / "TinyStories_train.bin"),
    }
    try:
        with tqdm(desc="tokenising", unit=" stories", unit_scale=True, disable=None) as bar:
            pieces = read_pieces(paths, bar)
            for is_val, stories, tokens in ordered_map(encode_piece, pieces, ranks, workers):
                writers[is_val].append(tokens)
                bar.update(stories)
        if not writers[True].count or not writers[False].count:
            raise DataError(
                "TinyStories: fewer than two source files with stories;"
                " the first is validation, the others are training"
            )
        for writer in writers.values():
            writer.close()
            print(f"wrote {writer.path}: {writer.count} tokens")
    finally:
        for writer in writers.values():
            writer.abort()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=DATA_DIR / "tinystories",
        metavar="DIR",
        help="output folder, 3.5 GB with the download (default: dev/data/tinystories)",
    )
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        metavar="FILE",
        help=f"files already downloaded: {ARCHIVE} (1.5 GB), or two or more of its data*.json",
    )
    add_worker_option(parser)
    add_encoding_options(parser)
    args = parser.parse_args()
    parser.check_input(args.input or [])
    return args


def main() -> None:
    """Downloads if need be, then tokenises."""
    args = parse_arguments()
    paths = args.input or [download(URL, args.out / ARCHIVE)]
    tokenise(paths, args.out, require_ranks(args.cache), args.workers)


if __name__ == "__main__":
    run_script(main)
