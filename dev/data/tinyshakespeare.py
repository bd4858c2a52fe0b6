"""Writes tiny Shakespeare as GPT-2 tokens, and GPT-2's tokenizer file.

Makes, in dev/data/tinyshakespeare (about 2 MB in all; downloads 2 MB):
  tiny_shakespeare_train.bin   305,260 tokens
  tiny_shakespeare_val.bin      32,768 tokens
  source.json                   where text and merge ranks came from, SHA-256 of the files
and gpt2_tokenizer.bin in the root of the repository.

Where the text can't be had, sentences made by synthetic.py take its place, and the output and
source.json say 'not tiny Shakespeare'. LLMC_DATA_OFFLINE=1 forbids the network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import (
    DATA_DIR,
    DEFAULT_TOKENIZER,
    ByteEncoder,
    DataError,
    Encoder,
    Gpt2Encoder,
    Parser,
    add_encoding_options,
    encode_documents,
    file_sha256,
    read_json,
    run_script,
    sha256_of,
    tokenizer_bytes,
    write_bytes,
    write_json,
    write_token_file,
)
from download import offline
from sources import TEXT_SHA256, Found, find_merge_ranks, find_shakespeare
from synthetic import make_text

VAL_TOKENS = 32768
TRAIN_FILE = "tiny_shakespeare_train.bin"
VAL_FILE = "tiny_shakespeare_val.bin"
TEXT_FILE = "tiny_shakespeare.txt"
SOURCE_FILE = "source.json"
TOKENIZER_KEY = "gpt2_tokenizer.bin"

KNOWN_SHA256 = {
    TRAIN_FILE: "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8",
    VAL_FILE: "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62",
    TOKENIZER_KEY: "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13",
}


def split_sections(text: str) -> list[str]:
    """The text cut after each empty line; every section but the last keeps its "\\n\\n"."""
    sections = text.split("\n\n")
    return [section + "\n\n" for section in sections[:-1]] + sections[-1:]


def hashes_on_disk(out: Path, tokenizer: Path) -> dict[str, str]:
    """SHA-256 of those of the three files that exist."""
    paths = {TRAIN_FILE: out / TRAIN_FILE, VAL_FILE: out / VAL_FILE, TOKENIZER_KEY: tokenizer}
    return {name: file_sha256(path) for name, path in paths.items() if path.exists()}


def is_complete(source: object, hashes: dict[str, str]) -> bool:
    """True when source.json stands beside exactly the files that it describes."""
    return isinstance(source, dict) and source.get("sha256") == hashes and len(hashes) == 3


def get_text(args: argparse.Namespace) -> Found:
    """Tiny Shakespeare from --input or the sources; `data` is None when there is none."""
    if args.input is None:
        return find_shakespeare(args.out / TEXT_FILE)
    data = args.input.read_bytes()
    expected = f"expected char-rnn's input.txt, SHA-256 {TEXT_SHA256}"
    if not data:
        raise DataError(f"--input {args.input}: empty; {expected}")
    try:
        data.decode()
    except UnicodeDecodeError:
        raise DataError(f"--input {args.input}: not a text file in UTF-8; {expected}") from None
    if (actual := sha256_of(data)) != TEXT_SHA256:
        raise DataError(f"--input {args.input}: SHA-256 is {actual}; {expected}")
    return Found(data, f"file {args.input.name}")


def write_tokens(out: Path, encoder: Encoder, text: str) -> tuple[int, int]:
    """Writes both token files; returns the number of training and validation tokens."""
    tokens = encode_documents(encoder, split_sections(text))
    train, val = tokens[VAL_TOKENS:], tokens[:VAL_TOKENS]
    write_token_file(out / VAL_FILE, val)
    write_token_file(out / TRAIN_FILE, train)
    return len(train), len(val)


def build(args: argparse.Namespace, text: Found, ranks: Found) -> None:
    """Tokenises, writes all files, and says what they are."""
    real_text, real_ranks = text.data is not None, ranks.data is not None
    encoder: Encoder = Gpt2Encoder(ranks.data) if ranks.data is not None else ByteEncoder()
    content = text.data.decode() if text.data is not None else make_text()
    train, val = write_tokens(args.out, encoder, content)
    write_bytes(args.tokenizer, tokenizer_bytes(encoder.entries))
    hashes = hashes_on_disk(args.out, args.tokenizer)
    if real_text and real_ranks and hashes != KNOWN_SHA256:
        wrong = [name for name, value in hashes.items() if value != KNOWN_SHA256[name]]
        raise DataError(
            f"{args.out}: {', '.join(wrong)} came out with a wrong SHA-256;"
            " the installed tiktoken does not encode as GPT-2 does"
        )
    write_json(
        args.out / SOURCE_FILE,
        {
            "text": "tinyshakespeare" if real_text else "synthetic",
            "text_from": text.source if real_text else "synthetic.py",
            "merges_from": ranks.source if real_ranks else "bytes",
            "sha256": hashes,
        },
    )
    print(f"wrote {args.out / TRAIN_FILE}: {train} tokens")
    print(f"wrote {args.out / VAL_FILE}: {val} tokens")
    print(f"wrote {args.tokenizer}: {len(encoder.entries)} entries")


def report(text: Found, ranks: Found) -> None:
    """Says plainly what stands in for the real thing, and why."""
    if text.data is None:
        print(f"not tiny Shakespeare: made-up sentences stand in ({text.failures[-1]})")
    if ranks.data is None:
        print(f"not GPT-2 tokens: one token a byte ({ranks.failures[-1]})")
    if text.data is not None and ranks.data is not None:
        print(f"tiny Shakespeare, SHA-256 right; text: {text.source}, merges: {ranks.source}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=DATA_DIR / "tinyshakespeare",
        metavar="DIR",
        help="output folder, 2 MB (default: dev/data/tinyshakespeare)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=DEFAULT_TOKENIZER,
        metavar="PATH",
        help="tokenizer file, 0.4 MB (default: gpt2_tokenizer.bin in the repository's root)",
    )
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="the text, already downloaded (char-rnn's input.txt, 1.1 MB)",
    )
    add_encoding_options(parser)
    args = parser.parse_args()
    parser.check_input([args.input] if args.input else [])
    parser.check_output_file("--tokenizer", args.tokenizer)
    return args


def main() -> None:
    """Does nothing when the files are right; otherwise makes them."""
    args = parse_arguments()
    given = get_text(args) if args.input else None  # checked also where there is nothing to do
    source = read_json(args.out / SOURCE_FILE)
    hashes = hashes_on_disk(args.out, args.tokenizer)
    complete = is_complete(source, hashes)
    if complete and hashes == KNOWN_SHA256:
        print(f"{args.out}: tiny Shakespeare is there and right, nothing to do")
        return
    if complete and args.input is None and offline():
        kind = "not tiny Shakespeare" if source["text"] == "synthetic" else "not GPT-2 tokens"
        print(f"{args.out}: {kind}; the files are there, nothing to do without network")
        return
    text = given or get_text(args)
    ranks = find_merge_ranks(args.cache)
    made_like_this = complete and source["text"] == "synthetic" and text.data is None
    if made_like_this and (source["merges_from"] == "bytes") == (ranks.data is None):
        print(f"{args.out}: the files are there, nothing to do")
    else:
        build(args, text, ranks)
    report(text, ranks)


if __name__ == "__main__":
    run_script(main)
