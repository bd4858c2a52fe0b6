"""Runs GoogleTest programs and pytest, and prints one summary of all of them.

A test that is skipped counts as a failure of the run unless test/skips.txt names it. The last line
is `N passed, N failed` with `, N skipped` behind it if there were any; the status is 0 only when at
least one test ran, none failed and each skip is listed.

With --jobs N above 1 the unit test programs run one after the other beside pytest, which has N
processes. What a unit test program prints then goes to LABEL.log in the folder of the reports,
which can be read while it runs, and appears when it has ended. A debugger (--pdb, --trace) needs
the terminal, so that everything runs one after the other.

SIGINT (Ctrl-C), SIGTERM or SIGHUP stops all programs, and whatever they have started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TIME_LIMIT_S = 7200  # for one program, also on a busy machine; a single Python test has less
PYTEST_TIME_LIMIT_S = 300
PYTEST_NO_TESTS = 5  # its exit status when no test ran
GRACE_S = 5  # to end after SIGINT; what is left is killed
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Tests start programs in sessions of their own, where no signal to a group reaches them: all that
# was started for this run, or for one of its programs (LABEL/ behind it), has this in its
# environment.
MARK_VARIABLE = "LLMC_TEST_RUN"
MARK = f"/{os.getpid()}.{time.time_ns()}/"
# What GoogleTest prints of tests that passed without a word, and around the tests of a suite.
SILENT = re.compile(r"^\[ RUN {6}\] .*\n\[ {7}OK \] .*\n|^\[-{10}\].*\n\n?", re.MULTILINE)
stopped = threading.Event()  # no further program is to start


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


def say(text: str) -> None:
    """Prints in one piece what another thread could print into."""
    print(f"{text}\n", end="", flush=True)


def marked(mark: str) -> list[int]:
    """The processes with a mark in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def send(mark: str, number: int) -> None:
    for process in marked(mark):
        with contextlib.suppress(OSError):
            os.kill(process, number)


def end(mark: str, grace_s: float) -> None:
    """Waits until all processes with a mark have ended, and kills what has not done so in time."""
    start = time.monotonic()
    while marked(mark) and (waited := time.monotonic() - start) < grace_s + 10:
        if waited >= grace_s:
            send(mark, signal.SIGKILL)
        time.sleep(0.05)


def stop(number: int, _: object) -> None:
    """A signal ends the run. SIGINT comes from the terminal, to each program in its group; others
    are passed on as SIGINT, at which pytest still tells what has failed so far."""
    for signal_ in STOP_SIGNALS:
        signal.signal(signal_, signal.SIG_IGN)
    stopped.set()
    if number != signal.SIGINT:
        send(MARK, signal.SIGINT)
    print(f"error: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def execute(label: str, command: list[str], log: int | None, interactive: bool) -> int | None:
    """The status of one program; None when the time limit stopped it, and what it had started."""
    mark = f"{MARK}{label}/"
    environment = {**os.environ, MARK_VARIABLE: os.environ.get(MARK_VARIABLE, "") + mark}
    try:
        program = subprocess.Popen(
            command, stdin=None if interactive else subprocess.DEVNULL,
            stdout=log, stderr=log, env=environment,
        )
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    if stopped.is_set():
        program.kill()
    try:
        return program.wait(None if interactive else TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        end(mark, 0)
        program.wait()
        return None


def run(label: str, command: list[str], report: Path, log: Path | None = None,
        interactive: bool = False) -> int | None:
    """Runs one program, see execute(). What it prints goes to `log`, if there is one, and from
    there to stdout at its end, without what says only that a test passed."""
    say(f"\n=== {label}, output in {log}" if log else f"=== {label}")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    start = time.monotonic()
    printed = ""
    if log:
        with open(log, "w") as file:
            status = execute(label, command, file.fileno(), interactive)
        printed = f"\n=== {label}\n" + SILENT.sub("", log.read_text(errors="replace"))
    else:
        status = execute(label, command, None, interactive)
    say(f"{printed}=== {label}: {time.monotonic() - start:.1f} s")
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
    # A log names each test, so that its end tells which one hangs.
    log = out / f"{label}.log" if beside else None
    brief = f"--gtest_brief={0 if log else 1}"
    status = run(label, [program, brief, f"--gtest_output=xml:{report}"], report, log)
    for case in read_report(report):
        add_case(results, f"{label} {case.get('classname')}.{case.get('name')}", case)
    check_end(results, label, status)
    return results


def run_units(units: list[str], out: Path, beside: bool) -> Results:
    """Runs programs, each given as LABEL=PROGRAM, one after the other."""
    results = Results()
    for unit in units:
        if stopped.is_set():
            break
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


def wants_debugger(arguments: list[str]) -> bool:
    return any(argument in ("--pdb", "--trace") for argument in arguments)


def run_pytest(arguments: list[str], out: Path, jobs: int) -> Results:
    """Runs pytest with a time limit for each test. The tests of a file share what they have made,
    so that one process runs all of them. One that ends its process fails several times, since
    pytest-xdist tries the rest of its file again, and counts once."""
    results = Results()
    report = out / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--timeout={PYTEST_TIME_LIMIT_S}"]
    if jobs > 1:
        command += ["-n", str(jobs), "--dist", "loadfile"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *arguments]
    interactive = wants_debugger(arguments)
    if interactive:  # Ctrl-C is the debugger's
        signal.signal(signal.SIGINT, lambda *_: None)
    status = run("pytest", command, report, interactive=interactive)
    if interactive:
        signal.signal(signal.SIGINT, stop)
    cases = read_report(report)
    for case in cases:
        if (name := pytest_name(case)) not in results.failed:
            add_case(results, name, case)
    if not (status == PYTEST_NO_TESTS and cases):  # all of them skipped
        check_end(results, "pytest", status)
    return results


def is_listed(name: str, accepted: set[str]) -> bool:
    """A unit test may be listed for one build (`cpu-bf16 Suite.Name`) or for all (`Suite.Name`)."""
    return name in accepted or name.split(" ")[-1] in accepted


def run_all(options: argparse.Namespace) -> Results:
    """All that the command line asks for."""
    jobs = 1 if wants_debugger(options.pytest or []) else options.jobs
    beside = jobs > 1 and options.pytest is not None
    with ThreadPoolExecutor(1) as other:
        try:
            units = other.submit(run_units, options.unit, options.out, beside)
            results = Results() if beside else units.result()
            if options.pytest is not None:
                results.add(run_pytest(options.pytest, options.out, jobs))
            if beside:
                results.add(units.result())
        except SystemExit:  # of stop()
            end(MARK, GRACE_S)
            raise
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unit", action="append", default=[], metavar="LABEL=PROGRAM")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of pytest")
    parser.add_argument("--skips", type=Path, required=True, help="list of accepted skips")
    parser.add_argument("--out", type=Path, required=True, help="folder for the XML reports")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, help="arguments for pytest")
    options = parser.parse_args()
    for unit in options.unit:
        if not all(unit.partition("=")):
            parser.error(f"--unit {unit}: expected LABEL=PROGRAM")
    try:
        accepted = read_skips(options.skips)
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except UnicodeDecodeError:
        sys.exit(f"error: --skips {options.skips}: not a text file in UTF-8")

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    results = run_all(options)

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
