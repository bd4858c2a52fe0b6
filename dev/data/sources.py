"""Where GPT-2's merge ranks and the tiny Shakespeare text come from, with their checksums.

The text is in the repository, compressed. Merge ranks come from the local cache, the usual internet
addresses, or Python packages that carry the file. Should the text's file be missing, internet
addresses are tried, and sentences made here are the last resort.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import DataError, Gpt2Encoder, ranks_from_vocab_bpe, sha256_of, write_bytes
from download import NoInternet, PackageFile, download, fetch_from_package

RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

RANKS_FILE = "gpt2_ranks.txt"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

RANKS_URLS = ("https://raw.githubusercontent.com/openai/whisper/main/whisper/assets/gpt2.tiktoken",)
VOCAB_BPE_URLS = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "https://huggingface.co/openai-community/gpt2/resolve/main/merges.txt",
)
# Two speech recognisers that tokenise with GPT-2's vocabulary; pinned, and checked by SHA-256.
RANKS_PACKAGES = (
    PackageFile("mlx-whisper==0.4.3", "mlx_whisper/assets/gpt2.tiktoken"),
    PackageFile("whisperlivekit==0.2.26", "whisperlivekit/whisper/assets/gpt2.tiktoken"),
)
# Shakespeare's plays are in the public domain; this is Karpathy's selection of 40,000 lines.
TEXT_ARCHIVE = Path(__file__).with_name("tinyshakespeare.txt.xz")
TEXT_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://raw.githubusercontent.com/jcjohnson/torch-rnn/master/data/tiny-shakespeare.txt",
)

# A source's name, and how to get the bytes from it.
Attempt = tuple[str, Callable[[], bytes]]


@dataclass(frozen=True)
class Found:
    """Bytes and where they came from; `data` is None when no source had them."""

    data: bytes | None
    source: str
    failures: tuple[str, ...] = ()


def find_merge_ranks(cache: Path) -> Found:
    """GPT-2's merge ranks in tiktoken's text form, checked by SHA-256 and kept in `cache`."""
    kept = cache / RANKS_FILE
    if kept.exists() and sha256_of(data := kept.read_bytes()) == RANKS_SHA256:
        return Found(data, "local copy with the right SHA-256")
    attempts: list[Attempt] = []
    attempts += [(url, partial(_fetch, url, kept, RANKS_SHA256)) for url in RANKS_URLS]
    attempts += [(url, partial(_ranks_from_vocab_url, url, cache)) for url in VOCAB_BPE_URLS]
    attempts += [(p.package, partial(fetch_from_package, p, RANKS_SHA256)) for p in RANKS_PACKAGES]
    found = _first_that_works(attempts)
    if found.data is not None and not kept.exists():
        write_bytes(kept, found.data)
    return found


def find_shakespeare(kept: Path) -> Found:
    """The tiny Shakespeare text, checked by SHA-256 and kept as the file `kept`."""
    if kept.exists() and sha256_of(data := kept.read_bytes()) == TEXT_SHA256:
        return Found(data, "local copy with the right SHA-256")
    attempts: list[Attempt] = [(TEXT_ARCHIVE.name, _text_from_archive)]
    attempts += [(url, partial(_fetch, url, kept, TEXT_SHA256)) for url in TEXT_URLS]
    return _first_that_works(attempts)


def require_ranks(cache: Path) -> bytes:
    """find_merge_ranks for scripts that are no use without them."""
    found = find_merge_ranks(cache)
    if found.data is None:
        raise DataError(f"GPT-2's merge ranks can't be had: {found.failures[-1]}")
    return found.data


def require_encoder(cache: Path) -> Gpt2Encoder:
    """GPT-2's encoder, or one clear error."""
    return Gpt2Encoder(require_ranks(cache))


def _fetch(url: str, path: Path, sha256: str) -> bytes:
    return download(url, path, sha256=sha256).read_bytes()


def _text_from_archive() -> bytes:
    """The repository's own copy."""
    if not TEXT_ARCHIVE.exists():
        raise DataError(f"{TEXT_ARCHIVE.name} is not there")
    try:
        data = lzma.decompress(TEXT_ARCHIVE.read_bytes())
    except lzma.LZMAError as error:
        raise DataError(f"{TEXT_ARCHIVE.name}: damaged: {error}") from error
    if (actual := sha256_of(data)) != TEXT_SHA256:
        raise DataError(f"{TEXT_ARCHIVE.name}: SHA-256 is {actual}, expected {TEXT_SHA256}")
    return data


def _ranks_from_vocab_url(url: str, cache: Path) -> bytes:
    """Downloads vocab.bpe and turns it into ranks."""
    path = download(url, cache / "gpt2_vocab_bpe.txt", sha256=VOCAB_BPE_SHA256)
    ranks = ranks_from_vocab_bpe(path.read_text(encoding="utf-8"))
    if (actual := sha256_of(ranks)) != RANKS_SHA256:
        raise DataError(f"{url}: ranks have SHA-256 {actual}, expected {RANKS_SHA256}")
    return ranks


def _first_that_works(attempts: list[Attempt]) -> Found:
    """The first attempt without an error; the other attempts' errors, each once."""
    failures: list[str] = []
    for source, attempt in attempts:
        try:
            return Found(attempt(), source, tuple(failures))
        except NoInternet as error:
            if str(error) not in failures:
                failures.append(str(error))
        except DataError as error:
            failures.append(str(error))
    return Found(None, "nowhere", tuple(failures))
