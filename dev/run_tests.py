"""Runs GoogleTest programs and pytest, and prints one summary of all of them.

A test that is skipped counts as a failure of the run unless test/skips.txt names it. The last line
is `N passed, N failed` with `, N skipped` behind it if there were any; the status is 0 only when at
least one test ran, none failed and each skip is listed.

With --jobs N above 1 the unit test programs run one after the other beside pytest, which has N
processes; what a unit test program prints appears when it has ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TIME_LIMIT_S = 1800  # for one program; a single Python test has less
PYTEST_TIME_LIMIT_S = 300
PYTEST_NO_TESTS = 5  # its exit status when no test ran


@dataclass
class Results:
    """Counts, and the names of what failed or was skipped."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, other: Results) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def read_skips(path: Path) -> set[str]:
    """The names in a list of accepted skips: one a line, # starts a comment."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {" ".join(line.split()) for line in lines if line}


def run(label: str, command: list[str], report: Path, beside: bool = False) -> int | None:
    """Runs one program; its status, or None when it was stopped by the time limit. `beside` others,
    it prints all at once at its end."""
    if not beside:
        print(f"=== {label}", flush=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        into = {"stdout": printed, "stderr": subprocess.STDOUT} if beside else {}
        try:
            done = subprocess.run(command, timeout=TIME_LIMIT_S, stdin=subprocess.DEVNULL, **into)
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        except OSError as error:
            print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
            status = 127
        printed.seek(0)
        before = f"\n=== {label}\n{printed.read()}" if beside else ""
    print(f"{before}=== {label}: {time.monotonic() - start:.1f} s", flush=True)
    return status


def add_case(results: Results, name: str, case: ElementTree.Element) -> None:
    """Counts one <testcase> of either report."""
    if case.find("failure") is not None or case.find("error") is not None:
        results.failed.append(name)
    elif case.find("skipped") is not None or case.get("status") == "notrun":
        results.skipped.append(name)
    else:
        results.passed += 1


def check_end(results: Results, label: str, status: int | None) -> None:
    """A program that ended badly without naming a failed test is one failure of its own."""
    if status != 0 and not results.failed:
        how = "ran into the time limit" if status is None else f"ended with status {status}"
        results.failed.append(f"{label} {how}")


def read_report(report: Path) -> list[ElementTree.Element]:
    """The test cases of an XML report; none when the program did not get to write it."""
    try:
        return list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []


def run_unit(label: str, program: str, out: Path, beside: bool) -> Results:
    """Runs a GoogleTest program; names are `label Suite.Name`."""
    results = Results()
    report = out / f"{label}.xml"
    command = [program, "--gtest_brief=1", f"--gtest_output=xml:{report}"]
    status = run(label, command, report, beside)
    for case in read_report(report):
        add_case(results, f"{label} {case.get('classname')}.{case.get('name')}", case)
    check_end(results, label, status)
    return results


def run_units(units: list[str], out: Path, beside: bool) -> Results:
    """Runs programs, each given as LABEL=PROGRAM, one after the other."""
    results = Results()
    for unit in units:
        label, _, program = unit.partition("=")
        results.add(run_unit(label, program, out, beside))
    return results


def pytest_name(case: ElementTree.Element) -> str:
    """The name by which pytest knows a test: file::class::function[parameters]."""
    file, name, classes = (case.get(key, "") for key in ("file", "name", "classname"))
    module = file.removesuffix(".py").replace("/", ".")
    if name == module:  # skipped as a whole
        return file
    if not file:  # could not be imported
        return name
    return "::".join([file, *filter(None, classes.removeprefix(module).split(".")), name])


def run_pytest(arguments: list[str], out: Path, jobs: int) -> Results:
    """Runs pytest with a time limit for each test. The tests of a file share what they have made,
    so that one process runs all of them."""
    results = Results()
    report = out / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--timeout={PYTEST_TIME_LIMIT_S}"]
    if jobs > 1:
        command += ["-n", str(jobs), "--dist", "loadfile"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *arguments]
    status = run("pytest", command, report)
    cases = read_report(report)
    for case in cases:
        add_case(results, pytest_name(case), case)
    if not (status == PYTEST_NO_TESTS and cases):  # all of them skipped
        check_end(results, "pytest", status)
    return results


def is_listed(name: str, accepted: set[str]) -> bool:
    """A unit test may be listed for one build (`cpu-bf16 Suite.Name`) or for all (`Suite.Name`)."""
    return name in accepted or name.split(" ")[-1] in accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", action="append", default=[], metavar="LABEL=PROGRAM")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of pytest")
    parser.add_argument("--skips", type=Path, required=True, help="list of accepted skips")
    parser.add_argument("--out", type=Path, required=True, help="folder for the XML reports")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, help="arguments for pytest")
    options = parser.parse_args()
    accepted = read_skips(options.skips)

    beside = options.jobs > 1 and options.pytest is not None
    with ThreadPoolExecutor(1) as other:
        units = other.submit(run_units, options.unit, options.out, beside)
        results = Results() if beside else units.result()
        if options.pytest is not None:
            results.add(run_pytest(options.pytest, options.out, options.jobs))
        if beside:
            results.add(units.result())

    unlisted = [name for name in results.skipped if not is_listed(name, accepted)]
    for name in results.failed:
        print(f"FAILED {name}")
    for name in results.skipped:
        listed = "" if name in unlisted else f" (listed in {options.skips})"
        print(f"SKIPPED {name}{listed}")
    if unlisted:
        print(f"error: {len(unlisted)} skipped tests are not listed in {options.skips}")
    if results.passed + len(results.failed) == 0:
        print("error: no test ran")
    line = f"{results.passed} passed, {len(results.failed)} failed"
    if results.skipped:
        line += f", {len(results.skipped)} skipped"
    print(line, flush=True)
    sys.exit(1 if results.failed or unlisted or results.passed == 0 else 0)


if __name__ == "__main__":
    main()
