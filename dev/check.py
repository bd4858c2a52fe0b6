"""Checks of `make check`: format, lengths, forbidden words, errors that pyflakes finds.

Looks at the files that git knows or would add. Prints one line for each finding and ends with
status 1 if there was any.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 100
CPP = {".h", ".cpp", ".cu", ".cuh"}
TEXT = CPP | {".py", ".sh", ".mk", ".awk", ".md", ".txt", ".sbatch"}
TEXT_NAMES = {"Makefile", "run", "grade"}
ASSERT = re.compile(r"\bassert\s*\(")
# These use the default stream; llmc/cuda_common.h says why a run has no use for it.
DEFAULT_STREAM = re.compile(r"\bcuda(Memcpy|Memset)(?!\w*Async)\w*\(")
# Spelt so that this file does not contain what it forbids.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")


def project_files() -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = {Path(name) for name in output.split("\0") if name}
    return sorted(p for p in paths if p.is_file() and (p.suffix in TEXT or p.name in TEXT_NAMES))


def is_trainer(path: Path) -> bool:
    """Whether the CUDA trainer is built from it."""
    return path.name == "train_gpt2.cu" or (path.parts[0] == "llmc" and path.parts[1] != "cpu")


def check_text(path: Path) -> list[str]:
    """Length of the file, forbidden words, white space."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    if len(lines) > MAX_FILE_LINES:
        found.append(f"{path}: {len(lines)} lines, at most {MAX_FILE_LINES}")
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if UNFINISHED.search(line):
            found.append(f"{where}: unfinished work belongs into an issue: {line.strip()}")
        if path.suffix in CPP and ASSERT.search(line.split("//")[0]):
            found.append(f"{where}: throw llmc::Error with a message instead of assert")
        if is_trainer(path) and DEFAULT_STREAM.search(line.split("//")[0]):
            found.append(f"{where}: copy_to_device, copy_to_host or cudaMemsetAsync on a stream of "
                         "one's own")
        if line != line.rstrip():
            found.append(f"{where}: white space at the end of the line")
        if path.suffix in {".py", ".sh"} and len(line) > 100:
            found.append(f"{where}: {len(line)} columns, at most 100")
    return found


def check_functions(path: Path) -> list[str]:
    """Length of each function."""
    try:
        import lizard
    except ModuleNotFoundError:
        sys.exit("error: Python package 'lizard' is missing; make setup has it in .venv/bin/python")
    # lizard chooses the language by the name and does not know .cu and .cuh.
    name = str(path) if path.suffix == ".py" else str(path.with_suffix(".cpp"))
    functions = lizard.analyze_file.analyze_source_code(name, path.read_text()).function_list
    return [
        f"{path}:{f.start_line}: {f.name} has {f.length} lines, at most {MAX_FUNCTION_LINES}"
        for f in functions
        if f.length > MAX_FUNCTION_LINES
    ]


def run_tool(module: str, *arguments: str) -> list[str]:
    """Runs a tool of the virtual environment; its lines when it finds something."""
    tool = Path(sys.executable).with_name(module)
    command = [str(tool)] if tool.exists() else [sys.executable, "-m", module]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if result.returncode == 0:
        return []
    return (result.stdout + result.stderr).splitlines() or [f"{module}: {result.returncode}"]


def format_findings(sources: list[str]) -> list[str]:
    """One line for each file that clang-format would change."""
    lines = run_tool("clang-format", "--dry-run", "-Werror", *sources)
    places = (re.match(r"(.+?:\d+):\d+: error", line) for line in lines)
    first = {}
    for place in filter(None, places):
        first.setdefault(place[1].rsplit(":", 1)[0], place[1])
    if lines and not first:
        return lines
    return [f"{place}: not formatted: .venv/bin/clang-format -i {file}"
            for file, place in first.items()]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    files = project_files()
    sources = [p for p in files if p.suffix in CPP]
    scripts = [p for p in files if p.suffix == ".py"]
    found = format_findings([str(p) for p in sources]) if sources else []
    found += run_tool("pyflakes", *map(str, scripts))
    for path in files:
        found += check_text(path)
    for path in sources + scripts:
        found += check_functions(path)
    print("\n".join(found or [f"check: {len(files)} files, nothing found"]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
