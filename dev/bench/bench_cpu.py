"""`make bench_cpu`: speed of the CPU build, so that a slow-down shows where no GPU is.

    python3 dev/bench/bench_cpu.py
    python3 dev/bench/bench_cpu.py --compare dev/bench/results/cpu-DATE.json --strict

Tokens a second of small works in fp32 and bf16, on one rank and on two, and milliseconds of single
launchers (launchers.cpp). Runs take turns, so that a busy spell of the machine does not meet one of
them alone; medians over all steps. Figures go into a JSON file in dev/bench/results/ and mean
something on this machine only: --compare refuses those of another processor. With --strict the
status is 1 when a figure is slower by more than --margin.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from compare_torch import ROOT, STEP_LINE, check_out, machine_record, run, save
from random_tokens import check_data, whole_number, write_random_tokens
from ranks import JobError, run_job

TOKENS = 1 << 20
# Name: model, sequences in a micro-batch, their length, tokens in a step. In the first one the
# vocabulary takes most of the time, in the second one the layers.
WORKS = {
    "vocabulary": ("custom:L2C128H4T64", 2, 64, 256),
    "layers": ("custom:L6C192H6T128V512", 2, 128, 512),
}
VOCAB = 512  # of the smallest: tokens beyond would be refused
TINY = ("custom:L1C32H2T32V512", 1, 32, 64)
PRECISIONS = ("fp32", "bf16")
TIME_LIMIT_S = 60
BUSY = 0.3  # load average over cores, above which nothing can be said of 10 %


def measure_work(args: argparse.Namespace, folder: Path, shape: tuple, ranks: int) -> list[float]:
    """Tokens a second of each step that counts."""
    model, batch, seq, total = shape
    flags = ["-e", model, "-i", args.data, "-b", batch, "-t", seq, "-d", total, "-v", 0, "-s", 0]
    flags += ["-l", "3e-4", "-x", args.steps + args.warmup, "-z", 1 if ranks > 1 else 0]
    job = run_job(folder / "train_gpt2cpu", ranks, "fs" if ranks > 1 else "", flags, TIME_LIMIT_S)
    times = [float(ms) for _, ms in STEP_LINE.findall(job.stdout)][args.warmup :]
    if set(job.statuses) != {0} or len(times) != args.steps:
        raise SystemExit(f"error: no {args.steps} steps\n{job}")
    return [total / ms * 1e3 for ms in times]


def measure(args: argparse.Namespace) -> dict:
    """Figures by unit and row: tok/s, where more is better, and ms, where less is."""
    speeds, times = defaultdict(list), defaultdict(list)
    works = {"tiny": TINY} if args.tiny else WORKS
    for _ in range(args.rounds):
        for precision in PRECISIONS:
            folder = args.build_dir / f"cpu-{precision}"
            for work, shape in works.items():
                for ranks in (1, 2):
                    name = f"{work}, {precision}, {ranks} rank{'s' if ranks > 1 else ''}"
                    speeds[name] += measure_work(args, folder, shape, ranks)
            program = folder / "bench_launchers"
            for line in run([str(program)]).splitlines() if program.exists() else []:
                launcher, ms = line.split()
                times[f"{launcher}, {precision}"].append(float(ms))
    if not times:
        print("no bench_launchers, which make bench_cpu builds: single launchers are left out")
    return {"tok/s": {name: statistics.median(values) for name, values in speeds.items()},
            "ms": {name: statistics.median(values) for name, values in times.items()}}


def speed_against(figure: float, earlier: float, unit: str) -> float:
    """Speed over the earlier one: below 1 is slower."""
    return figure / earlier if unit == "tok/s" else earlier / figure


def read_earlier(path: Path, record: dict) -> dict:
    """The figures of an earlier run; ends the program when they are of another machine."""
    try:
        earlier = json.loads(path.read_text())
        figures = {unit: earlier["figures"][unit] for unit in ("tok/s", "ms")}
        machine = (earlier["cpu"], earlier["cores"])
    except OSError as error:
        raise SystemExit(f"error: --compare {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"error: --compare {path}: not a file of this script; expected what an "
                         "earlier run wrote, cpu-DATE.json") from None
    here = (record["cpu"], record["cores"])
    if machine != here:
        raise SystemExit(f"error: --compare {path}: measured on {machine[0]}, {machine[1]} cores; "
                         f"this is {here[0]}, {here[1]} cores")
    return figures


def print_table(figures: dict, earlier: dict | None, margin: float) -> list[str]:
    """Prints all rows; returns the names of those that are slower by more than the margin."""
    slower = []
    print(f"\n{'row':34} {'figure':>10} {'unit':6}" + (" earlier   speed" if earlier else ""))
    for unit, rows in figures.items():
        for name, figure in rows.items():
            line = f"{name:34} {figure:10.{0 if unit == 'tok/s' else 3}f} {unit:6}"
            if earlier and name in earlier[unit]:
                ratio = speed_against(figure, earlier[unit][name], unit)
                line += f"{earlier[unit][name]:8.{0 if unit == 'tok/s' else 3}f} {ratio:7.3f}"
                if ratio < 1 - margin:
                    slower.append(name)
                    line += "  SLOWER"
            print(line)
    return slower


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier run on this machine")
    parser.add_argument("--margin", type=float, default=0.1, help="how much slower is too slow")
    parser.add_argument("--strict", action="store_true", help="status 1 when a figure is slower")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build",
                        help="folder with cpu-fp32/train_gpt2cpu and cpu-bf16/train_gpt2cpu")
    parser.add_argument("--data", help="token file, below 512 (default: random tokens)")
    parser.add_argument("--steps", type=whole_number(1), default=6,
                        help="steps of a run that count")
    parser.add_argument("--warmup", type=whole_number(0), default=2, help="steps before them")
    parser.add_argument("--rounds", type=whole_number(1), default=2, help="runs of each row")
    parser.add_argument("--commit", help="what to record where the tree came without .git")
    parser.add_argument("--out", type=Path, default=ROOT / "dev" / "bench" / "results")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script")
    args = parser.parse_args()
    if not 0 <= args.margin < 1:
        parser.error(f"--margin {args.margin}: must be at least 0 and below 1")
    check_out(parser, args.out)
    check_data(parser, args.data)
    if args.compare is not None and not args.compare.is_file():
        parser.error(f"--compare {args.compare}: no such file; expected an earlier run's")
    args.build_dir = args.build_dir.resolve()
    args.trainer = args.build_dir / "cpu-fp32" / "train_gpt2cpu"
    for precision in PRECISIONS:
        trainer = args.build_dir / f"cpu-{precision}" / "train_gpt2cpu"
        if not os.access(trainer, os.X_OK):
            parser.error(f"--build-dir: no {trainer}; make bench_cpu builds it")
    return args


def main() -> None:
    args = parse_arguments()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    record = {**machine_record(args), "cores": cores, "load": load}
    if load > BUSY * cores:
        print(f"warning: others keep {load:.1f} of {cores} cores busy: figures will be too low")
    earlier = read_earlier(args.compare, record) if args.compare else None
    if args.data is None:
        args.data = str(ROOT / "build" / "bench" / "random-cpu.bin")
        write_random_tokens(Path(args.data), TOKENS, VOCAB)
    try:
        record["figures"] = measure(args)
    except JobError as error:
        raise SystemExit(f"error: {error}") from None
    slower = print_table(record["figures"], earlier, args.margin)
    save(args.out, "cpu", record)
    if slower:
        print(f"slower by more than {100 * args.margin:g} %: {'; '.join(slower)}")
    sys.exit(1 if slower and args.strict else 0)


if __name__ == "__main__":
    main()
