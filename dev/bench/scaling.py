"""Speed on several GPUs beside one, at the same -b and -d, with ZeRO-1; and what the canonical
order of sums costs beside -rw 1.

    python3 dev/bench/scaling.py                            all works, on 1, 2, 4 and 8 GPUs
    python3 dev/bench/scaling.py --works d12 d12-b4 --counts 1 2 --no-plain --each

Runs from the repository's root, on random tokens. A speed is the tokens of a step over the
median time of the steps after the first few; the share of linear is the speed of N GPUs over N
times that of one, in this run. GPUs of one host differ, and N together are as fast as the
slowest: --each also has every GPU train by itself, all at the same time, for the share of what
they add up to. Results go into one JSON file in dev/bench/results/. Ends with status 1 when
--strict is given and a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Sequence

from compare_torch import (
    MEMORY_LINE, OUT_HELP, ROOT, STEP_LINE, machine_record, save, settle_out, settle_trainer
)
from random_tokens import check_data, whole_number, write_random_tokens
from ranks import Ended, Job, JobError, count_gpus, run_job

SEQ = 1024
TOKENS = 1 << 23
# Name: model, sequences in a micro-batch, tokens in a step, least share of linear on two GPUs.
WORKS = {
    "d12": ("d12", 64, 524288, 0.99),
    "d12-131072": ("d12", 64, 131072, 0.98),
    "d12-b4": ("d12", 4, 32768, 0.96),
    "d48": ("d48", 16, 131072, 0.985),
    "d12-262144": ("d12", 64, 262144, None),
}
DEFAULT_WORKS = ["d12", "d12-131072", "d12-b4", "d48"]
# The most that the canonical order may cost of a step.
CANONICAL_COST = {"d12": 0.01, "d12-b4": 0.02}
SIZES = (1, 2, 4, 8)
TIME_LIMIT_S = 400


def trainer_args(args: argparse.Namespace, work: str, more: list[str]) -> list[str]:
    model, batch, total, _ = WORKS[work]
    if args.cpu:  # to try this script where there is no GPU
        model, batch, total = "custom:L2C64H4T64", 1, 512
    seq = 64 if args.cpu else SEQ
    command = ["-e", model, "-i", args.data, "-b", str(batch), "-t", str(seq), "-d", str(total)]
    command += ["-x", str(args.steps + args.warmup), "-l", "3e-4", "-v", "0", "-s", "0"]
    return command + more + args.trainer_args.split()


def tokens_of_step(run: Ended) -> int:
    return int(re.findall(r"^\| tokens in a step +\| (\d+)", run.stdout, re.M)[0])


def step_times(args: argparse.Namespace, run: Ended) -> list[float]:
    """Milliseconds of the steps that count."""
    times = [float(ms) for _, ms in STEP_LINE.findall(run.stdout)][args.warmup :]
    if len(times) != args.steps:
        raise SystemExit(f"error: {len(times)} step lines of {args.steps}\n{run}")
    return times


def measure_each(args: argparse.Namespace, work: str, count: int) -> list[float]:
    """Tokens a second of GPUs 0 ... count - 1, each by itself, at the same time."""
    options = trainer_args(args, work, ["-z", "0"])
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Job(args.trainer, 1, "", options, env={"CUDA_VISIBLE_DEVICES": str(gpu)}))
            for gpu in range(count)]
        runs = [job.wait(TIME_LIMIT_S) for job in jobs]
    speeds = []
    for gpu, run in enumerate(runs):
        if set(run.statuses) != {0}:
            raise SystemExit(f"error: {work} on GPU {gpu} by itself\n{run}")
        speeds.append(tokens_of_step(run) / statistics.median(step_times(args, run)) * 1e3)
        print(f"{work:12} GPU {gpu} by itself {speeds[-1]:10.0f} tok/s", flush=True)
    return speeds


def measure(args: argparse.Namespace, work: str, count: int, more: list[str]) -> dict:
    """One run of `count` GPUs."""
    options = trainer_args(args, work, ["-z", "1" if count > 1 else "0", *more])
    way = args.way if count > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        run = run_job(args.trainer, count, way, [*options, "-o", folder], TIME_LIMIT_S)
        if set(run.statuses) != {0}:
            raise SystemExit(f"error: {work} on {count} GPUs\n{run}")
        record = json.loads((Path(folder) / "run.json").read_text())
    times = step_times(args, run)
    median = statistics.median(times)
    result = {
        "command": " ".join([args.trainer, *options]),
        "started_by": way or "itself",
        "tokens_per_second": tokens_of_step(run) / median * 1e3,
        "median_ms": median,
        "min_ms": min(times),
        "max_ms": max(times),
        "memory_gib": float(MEMORY_LINE.findall(run.stdout)[-1]) / 1024,
        "seconds_in_all": run.seconds,
        "commit": record["commit"],
        "build": record["build"],
        "libraries": record["libraries"],
    }
    print(f"{work:12} N {count} {' '.join(more):6} {result['tokens_per_second']:10.0f} tok/s  "
          f"median {median:9.2f} ms, {min(times):.2f} to {max(times):.2f}", flush=True)
    return result


def median_run(runs: Sequence[dict]) -> dict:
    """The run in the middle by its median step (the slower one of two), and what each took."""
    middle = sorted(runs, key=lambda run: run["median_ms"])[len(runs) // 2]
    return {**middle, "medians_ms": [run["median_ms"] for run in runs]}


def measure_work(args: argparse.Namespace, work: str) -> dict:
    """All numbers of GPUs of one work, and the plain path where that is wanted."""
    _, batch, total, _ = WORKS[work]
    most = 8 if args.cpu else total // (batch * SEQ)
    counts = [count for count in args.counts if count <= most]
    result: dict = {"canonical": {}, "plain": {}, "share_of_linear": {}, "canonical_cost": {}}
    runs: dict = {"canonical": defaultdict(list), "plain": defaultdict(list)}
    for _ in range(args.turns):
        for count in counts:
            runs["canonical"][str(count)].append(measure(args, work, count, []))
            if args.plain and work in CANONICAL_COST:
                runs["plain"][str(count)].append(measure(args, work, count, ["-rw", "1"]))
    for order, of_counts in runs.items():
        result[order] = {count: median_run(each) for count, each in of_counts.items()}
    if args.each and max(counts, default=1) > 1:
        result["each"] = measure_each(args, work, max(counts))
        result["share_of_each"] = {
            str(count): result["canonical"][str(count)]["tokens_per_second"]
            / sum(result["each"][:count]) for count in counts if count > 1}
    one = result["canonical"].get("1")
    for count in counts:
        canonical = result["canonical"][str(count)]
        if one and count > 1:
            share = canonical["tokens_per_second"] / (count * one["tokens_per_second"])
            result["share_of_linear"][str(count)] = share
        plain = result["plain"].get(str(count))
        if plain:
            result["canonical_cost"][str(count)] = canonical["median_ms"] / plain["median_ms"] - 1
    return result


def find_targets(results: dict) -> list[dict]:
    """What was to be reached, and whether it was."""
    targets = []
    for work, result in results.items():
        least = WORKS[work][3]
        share = result["share_of_linear"].get("2")
        if least is not None and share is not None:
            targets.append({"what": f"{work}: share of linear on 2 GPUs", "value": share,
                            "least": least, "met": share >= least})
        for count, cost in result["canonical_cost"].items():
            targets.append({"what": f"{work}: cost of the canonical order on {count} GPUs",
                            "value": cost, "most": CANONICAL_COST[work],
                            "met": cost <= CANONICAL_COST[work]})
    return targets


def print_table(results: dict) -> None:
    print(f"\n{'work':12} {'GPUs':>4} {'tok/s':>10} {'of linear':>9} {'of each':>9} "
          f"{'-rw 1 tok/s':>11} {'cost':>8}")
    for work, result in results.items():
        for count, run in result["canonical"].items():
            share = result["share_of_linear"].get(count)
            of_each = result.get("share_of_each", {}).get(count)
            plain = result["plain"].get(count)
            cost = result["canonical_cost"].get(count)
            print(f"{work:12} {count:>4} {run['tokens_per_second']:10.0f} "
                  f"{f'{100 * share:.2f} %' if share else '':>9} "
                  f"{f'{100 * of_each:.2f} %' if of_each else '':>9} "
                  f"{format(plain['tokens_per_second'], '.0f') if plain else '':>11} "
                  f"{f'{100 * cost:+.2f} %' if cost is not None else '':>8}")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """`words` in place of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=DEFAULT_WORKS)
    parser.add_argument("--counts", nargs="+", type=int, choices=SIZES, help="numbers of GPUs")
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="leave out -rw 1")
    parser.add_argument("--each", action="store_true", help="every GPU by itself as well")
    parser.add_argument("--trainer", help="default: ./train_gpt2cu; with --cpu ./train_gpt2cpu")
    parser.add_argument("--trainer-args", default="", help="more flags for it, such as '-r 0'")
    parser.add_argument("--way", choices=["mpi", "tcp", "fs"],
                        default="mpi" if shutil.which("mpirun") else "tcp")
    parser.add_argument("--data", help="token file (default: random tokens)")
    parser.add_argument("--steps", type=whole_number(1), default=20, help="steps that count")
    parser.add_argument("--warmup", type=whole_number(0), default=5, help="steps before them")
    parser.add_argument("--turns", type=whole_number(1), default=1, help="runs of each setting")
    parser.add_argument("--commit", help="what to record where the tree came without .git")
    parser.add_argument("--out", type=Path, help=OUT_HELP)
    parser.add_argument("--strict", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--cpu", action="store_true", help="a small model, to try this script")
    args = parser.parse_args(words)
    if args.way == "mpi" and not shutil.which("mpirun"):
        parser.error("--way mpi: there is no mpirun here; expected tcp or fs")
    settle_out(parser, args)
    check_data(parser, args.data, ROOT)
    settle_trainer(parser, args)
    if args.counts is None:
        gpus = 2 if args.cpu else count_gpus()
        args.counts = [count for count in SIZES if count <= gpus]
    return args


def main() -> None:
    args = parse_arguments()
    if not args.counts:
        raise SystemExit("error: no GPU")
    os.chdir(ROOT)
    if args.data is None:
        args.data = "build/bench/random.bin"
        write_random_tokens(Path(args.data), TOKENS)
    record = {**machine_record(args), "gpus": count_gpus()}
    try:
        results = {work: measure_work(args, work) for work in args.works}
    except JobError as error:
        raise SystemExit(f"error: {error}") from None
    targets = find_targets(results)
    record.update(scaling=results, targets=targets)
    print_table(results)
    for target in targets:
        bound = f"at least {target['least']}" if "least" in target else f"at most {target['most']}"
        print(f"{'met' if target['met'] else 'NOT MET':8}{target['value']:.4f}, {bound}: "
              f"{target['what']}")
    if args.keep:
        save(args.out, "cpu-trial" if args.cpu else "scaling", record)
    if args.strict and not all(target["met"] for target in targets):
        sys.exit(1)


if __name__ == "__main__":
    main()
