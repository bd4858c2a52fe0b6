"""Writes FineWeb or FineWeb-Edu (Penedo et al. 2024) as shards of GPT-2 tokens.

  --sample     tokens         parquet download   shards of 100 M tokens (200 MB each)
  10BT          10 billion    about  30 GB       about   103, 21 GB
  100BT        100 billion    about 300 GB       about 1,030, 210 GB

Shard 0 is validation, the others are training; each document is preceded by <|endoftext|>, and
a document may run over into the next shard. Output: dev/data/fineweb10B/fineweb_val_000000.bin,
fineweb_train_000001.bin ... (with --edu: edu_fineweb10B/edu_fineweb_...).

Interrupted, the same command goes on after the last finished shard, and with the half-loaded
file. Reading parquet needs pyarrow (.venv/bin/pip install pyarrow).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import (
    DATA_DIR,
    DataError,
    Parser,
    TokenFileWriter,
    add_encoding_options,
    add_worker_option,
    encode_in_worker,
    file_sha256,
    np,
    open_text,
    ordered_map,
    positive_int,
    read_json,
    run_script,
    tqdm,
    write_json,
)
from download import HubFile, download, list_hub_files
from sources import require_ranks

DOCUMENTS_A_PIECE = 512
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Source:
    """One input file: its name, and how to get it onto the disk; `content` of --input's files."""

    name: str
    fetch: Callable[[], Path]
    downloaded: bool
    content: dict[str, int | str] | None = None


@dataclass(frozen=True)
class Position:
    """The first token that is not in a finished shard: file, piece of the file, token of it."""

    shard: int = 0
    file: int = 0
    piece: int = 0
    token: int = 0


def read_jsonl(path: Path) -> Iterator[list[str]]:
    """Texts of a file with one JSON object a line, in pieces."""
    texts: list[str] = []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(f"{path}:{number}: expected a JSON object with a 'text'")
            texts.append(text)
            if len(texts) == DOCUMENTS_A_PIECE:
                yield texts
                texts = []
    if texts:
        yield texts


def read_parquet(path: Path) -> Iterator[list[str]]:
    """The 'text' column of a parquet file, in pieces."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        install = f"{sys.executable} -m pip install pyarrow"
        raise DataError(f"{path}: reading parquet needs pyarrow: {install}") from None
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(DOCUMENTS_A_PIECE, columns=["text"]):
                yield [text or "" for text in batch.column("text").to_pylist()]
    except (pyarrow.ArrowException, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a parquet file with a 'text' column ({reason})") from None


def read_pieces(path: Path) -> Iterator[list[str]]:
    """Texts of one input file, in pieces of a fixed number of documents."""
    return read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)


def hub_source(file: HubFile, folder: Path) -> Source:
    """A file of the data set, downloaded when its turn comes."""
    path = folder / file.name
    return Source(file.name, partial(download, file.url, path, sha256=file.sha256), True)


def local_source(path: Path) -> Source:
    """A file of --input; its name alone would not tell it from one in another folder."""
    content = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    return Source(path.name, partial(Path, path), False, content)


class ShardWriter:
    """Cuts a stream of tokens into shards, and notes after each one where the stream stands."""

    def __init__(
        self, out: Path, prefix: str, size: int, limit: int | None, sources: list[Source]
    ) -> None:
        self.out, self.prefix, self.size, self.limit = out, prefix, size, limit
        names = [source.name for source in sources]
        self._identity = {"prefix": prefix, "shard_size": size, "files": names}
        self._contents = [source.content for source in sources]
        self._writer: TokenFileWriter | None = None
        self.shard = 0

    @property
    def full(self) -> bool:
        """True when as many shards as were asked for are there."""
        return self.limit is not None and self.shard >= self.limit

    def resume(self) -> Position | None:
        """Where an earlier run of the same command stands; None when there is nothing to do."""
        progress = read_json(self.out / PROGRESS_FILE)
        if progress is None:
            return Position()
        try:
            same = progress["made_from"] == self._identity
            position, finished = Position(**progress["position"]), progress["finished"]
            # Earlier versions noted names alone: their shards are taken by these.
            noted = list(progress.get("contents", self._contents))
        except (KeyError, TypeError):
            raise DataError(
                f"{self.out / PROGRESS_FILE}: not written by this script;"
                " delete the folder or choose another --out"
            ) from None
        if not same:
            raise DataError(
                f"--out {self.out}: holds shards made from other files or with another"
                " --shard-size; delete the folder or choose another"
            )
        for name, before, now in zip(self._identity["files"], noted, self._contents):
            if before and now and before != now:
                raise DataError(
                    f"--input {name}: not the file of this name that the shards in --out {self.out}"
                    " were made from; delete the folder or choose another"
                )
        self.shard = position.shard
        # Earlier versions took input without documents for done.
        return None if (finished and self.shard) or self.full else position

    def add(self, tokens: np.ndarray, file: int, piece: int, start: int) -> None:
        """Adds tokens[start:], which are those of one piece of one file."""
        while start < len(tokens) and not self.full:
            if self._writer is None:
                split = "train" if self.shard else "val"
                name = f"{self.prefix}_{split}_{self.shard:06d}.bin"
                self._writer = TokenFileWriter(self.out / name)
            taken = tokens[start : start + self.size - self._writer.count]
            self._writer.append(taken)
            start += len(taken)
            if self._writer.count == self.size:
                self._finish_shard(Position(self.shard + 1, file, piece, start), False)

    @property
    def empty(self) -> bool:
        """True when there has been no token yet."""
        return self.shard == 0 and self._writer is None

    def finish(self, file: int) -> None:
        """Closes the last, shorter shard and notes that all is done."""
        self._finish_shard(Position(self.shard + (self._writer is not None), file), True)
        if self.shard < 2:
            print("only the validation shard: choose a smaller --shard-size to get training data")

    def _finish_shard(self, position: Position, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()
            tqdm.write(f"wrote {self._writer.path}: {self._writer.count} tokens")
            self._writer = None
        self.shard = position.shard
        note = {
            "made_from": self._identity,
            "contents": self._contents,
            "position": vars(position),
            "finished": finished,
        }
        write_json(self.out / PROGRESS_FILE, note)

    def abort(self) -> None:
        """Drops the unfinished shard."""
        if self._writer is not None:
            self._writer.abort()


Piece = tuple[int, int, list[str]]


def encode_piece(piece: Piece) -> tuple[int, int, int, np.ndarray]:
    """Runs in a worker: (file, piece, number of documents, tokens)."""
    return piece[0], piece[1], len(piece[2]), encode_in_worker(piece[2])


def stream_pieces(sources: list[Source], start: Position, delete_used: bool) -> Iterator[Piece]:
    """All pieces from `start` on; a file is fetched when the stream gets to it.

    With `delete_used`, a downloaded file is removed once it has been read; a restart may have to
    fetch the last one again, since its end may lie in a shard that was not finished.
    """
    for number in range(start.file, len(sources)):
        path = sources[number].fetch()
        first = start.piece if number == start.file else 0
        for piece, texts in enumerate(itertools.islice(read_pieces(path), first, None), first):
            yield number, piece, texts
        if delete_used and sources[number].downloaded:
            path.unlink(missing_ok=True)


def tokenise(
    sources: list[Source], writer: ShardWriter, ranks: bytes, args: argparse.Namespace
) -> None:
    """Writes the shards that are still missing, --max-shards of them at most."""
    start = writer.resume()
    if start is None:
        print(f"{args.out}: {writer.shard} shards are there, nothing to do")
        return
    if start.shard:
        print(f"{args.out}: going on after {start.shard} finished shards")
    pieces = stream_pieces(sources, start, args.delete_used)
    results = ordered_map(encode_piece, pieces, ranks, args.workers)
    skip = start.token
    try:
        with tqdm(desc="tokenising", unit=" documents", unit_scale=True, disable=None) as bar:
            while not writer.full:
                result = next(results, None)
                if result is None:
                    if writer.empty:
                        where = ", ".join(map(str, args.input or [args.out / "parquet"]))
                        raise DataError(f"{where}: no documents in it")
                    writer.finish(len(sources))
                    return
                file, piece, documents, tokens = result
                writer.add(tokens, file, piece, skip)
                skip = 0
                bar.update(documents)
                bar.set_postfix_str(f"shard {writer.shard}, {sources[file].name}")
    finally:
        results.close()
        writer.abort()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--sample", choices=("10BT", "100BT"), default="10BT", help="see above")
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu instead of FineWeb")
    parser.add_argument(
        "--shard-size",
        type=positive_int,
        default=100_000_000,
        metavar="TOKENS",
        help="tokens a shard, 2 bytes each (default: 100,000,000 = 200 MB)",
    )
    parser.add_argument(
        "--max-shards",
        type=positive_int,
        metavar="N",
        help="stop when N shards are there (with 10BT, 11 shards need about 3 GB of download)",
    )
    parser.add_argument(
        "--delete-used",
        action="store_true",
        help="delete each downloaded file (about 2 GB) once it is tokenised",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: dev/data/fineweb10B, edu_fineweb10B, ...)",
    )
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files already downloaded (.parquet, about 2 GB each, or .jsonl), in this order",
    )
    add_worker_option(parser)
    add_encoding_options(parser)
    args = parser.parse_args()
    for path in args.input or []:
        if path.suffix not in (".parquet", ".jsonl", ".json"):
            parser.error(f"--input {path}: expected a .parquet or .jsonl file")
    parser.check_input(args.input or [])
    args.prefix = "edu_fineweb" if args.edu else "fineweb"
    args.out = args.out or DATA_DIR / f"{args.prefix}{args.sample.removesuffix('T')}"
    return args


def list_sources(args: argparse.Namespace) -> list[Source]:
    """The input files: --input's, or those of the published sample."""
    if args.input:
        return [local_source(path) for path in args.input]
    repo = "HuggingFaceFW/fineweb-edu" if args.edu else "HuggingFaceFW/fineweb"
    files = list_hub_files(repo, f"sample/{args.sample}", ".parquet")
    print(f"{repo} {args.sample}: {len(files)} files, {sum(f.size for f in files) / 1e9:.0f} GB")
    return [hub_source(file, args.out / "parquet") for file in files]


def main() -> None:
    """Downloads and tokenises file by file."""
    args = parse_arguments()
    sources = list_sources(args)
    writer = ShardWriter(args.out, args.prefix, args.shard_size, args.max_shards, sources)
    tokenise(sources, writer, require_ranks(args.cache), args)


if __name__ == "__main__":
    run_script(main)
