"""`make bench`: the project's table of speeds, measured on the GPUs at hand in one command.

    python3 dev/bench/bench.py                                  all parts
    python3 dev/bench/bench.py --parts torch --works d12 d48    one part, some of its works
    python3 dev/bench/bench.py --parts start validation memory  what takes two minutes

Parts: torch (beside PyTorch, compare_torch.py), scaling (several GPUs beside one, scaling.py), comm
(bandwidth beside NCCL's own calls, comm.sh), start (seconds to the first step's line), validation
(its speed beside the forward pass alone, forward.cu), memory (beside llm.c). What the machine lacks
is said and left out. One table at the end, and one JSON file in dev/bench/results/, unless no part
was measured. Ends with status 1 when a part fails, or when --strict is given and a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Callable

import compare_torch
import scaling
from compare_torch import (
    MEMORY_LINE, RESULTS, ROOT, check_out, machine_record, save, settle_trainer
)
from random_tokens import VOCAB, check_data, whole_number, write_random_tokens
from ranks import count_gpus

TOKENS = 1 << 23
CPU_MODEL, CPU_VOCAB = "custom:L2C64H4T64V512", 512
LEAST_OF_TORCH = 1.0
START_LIMIT_S, STARTS = 5.0, 3
# Share of the forward pass's speed that validation has to reach.
LEAST_OF_FORWARD = 0.95
VALIDATIONS = 3  # the first one is warm-up
# Of llm.c for d12 at B 64, in MiB, by level of -r. Its figures, 28.5 and 24.3 GB, are thousands of
# MiB: their difference is the 4,224 MiB of 11 layers' GELU. The trainer's tree of sums may take its
# spares on top.
LLMC_MEMORY = {0: 28500, 1: 24300}
SPARE_LINE = re.compile(r"^\| gradients +\| spare .*\| +([\d.]+) \|$", re.MULTILINE)
FORWARD_LINE = re.compile(r"^forward: .* (\d+) tok/s$", re.MULTILINE)
TIME_LIMIT_S = 300


class Table:
    """Rows of the result; how to print them."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, name: str, figure: float, unit: str, peer: float | None = None,
            least: float | None = None, most: float | None = None) -> None:
        """least and most are for the ratio to `peer`; for the figure where there is no peer."""
        ratio = figure / peer if peer else None
        value = figure if peer is None else ratio
        met = None
        if value is not None and (least is not None or most is not None):
            met = value >= least if least is not None else value <= most
        self.rows.append({"row": name, "figure": figure, "unit": unit, "peer": peer,
                          "ratio": ratio, "least": least, "most": most, "met": met})

    def print(self) -> None:
        def text(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        print(f"\n{'row':52} {'figure':>11} {'unit':6} {'peer':>11} {'ratio':>7} {'target':>8}")
        for row in self.rows:
            form = ",.0f" if row["figure"] >= 1000 else ".3f"
            sign = ">=" if row["most"] is None else "<="
            bound = row["least"] if row["most"] is None else row["most"]
            target = "" if bound is None else f"{sign} {bound:.3f}"
            met = {None: "", True: "met", False: "NOT MET"}[row["met"]]
            print(f"{row['row']:52} {row['figure']:>11{form}} {row['unit']:6} "
                  f"{text(row['peer'], form):>11} {text(row['ratio'], '.3f'):>7} {target:>8} {met}")

    def all_met(self) -> bool:
        return all(row["met"] is not False for row in self.rows)


def forwarded(args: argparse.Namespace) -> list[str]:
    """Options that the other scripts take, too."""
    words = ["--trainer", args.trainer, "--data", args.data]
    words += [f"--trainer-args={args.trainer_args}", "--steps", str(args.steps)]
    return words + ["--warmup", str(args.warmup)] + (["--cpu"] if args.cpu else [])


def works_among(args: argparse.Namespace, known: list[str]) -> list[str]:
    return [work for work in known if args.works is None or work in args.works]


def trainer_flags(args: argparse.Namespace) -> list[str]:
    """d12 at B 64, or a small model."""
    model, batch, seq = (CPU_MODEL, 2, 64) if args.cpu else ("d12", 64, 1024)
    return ["-e", model, "-i", args.data, "-b", str(batch), "-t", str(seq), "-s", "0"]


def timed_lines(command: list[str]) -> list[tuple[float, str]]:
    """Each line of its standard output, and when it came, in seconds from the program's start."""
    print("$ " + " ".join(command), flush=True)
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(TIME_LIMIT_S, process.kill)
        watchdog.start()
        lines = [(time.monotonic() - start, line.rstrip("\n")) for line in process.stdout or ()]
        status = process.wait()
        watchdog.cancel()
    if status != 0:
        print("\n".join(line for _, line in lines[-20:]))
        raise SystemExit(f"{command[0]} ended with status {status}")
    return lines


def text_of(command: list[str]) -> str:
    return "\n".join(line for _, line in timed_lines(command))


# ---- the parts: each adds rows to the table, and returns what goes into the JSON file


def measure_torch(args: argparse.Namespace, table: Table) -> dict:
    works = works_among(args, list(compare_torch.WORKS))
    theirs = compare_torch.parse_arguments([*forwarded(args), "--works", *works])
    results = compare_torch.compare_speed(theirs, args.gpu)
    for work, result in results.items():
        peer = result["torch"].get(result["peer"])
        table.add(f"{work} beside PyTorch", result["trainer"]["tokens_per_second"], "tok/s",
                  peer and peer["tokens_per_second"], least=LEAST_OF_TORCH if peer else None)
    return results


def measure_scaling(args: argparse.Namespace, table: Table) -> dict:
    works = works_among(args, scaling.DEFAULT_WORKS)
    way = ["--way", args.way] if args.way else []
    turns = ["--turns", "1" if args.cpu else "3"]
    theirs = scaling.parse_arguments([*forwarded(args), *way, *turns, "--works", *works])
    results = {work: scaling.measure_work(theirs, work) for work in works}
    scaling.print_table(results)
    for work, result in results.items():
        one = result["canonical"]["1"]["tokens_per_second"]
        for count in result["share_of_linear"]:
            speed = result["canonical"][count]["tokens_per_second"]
            table.add(f"{work} on {count} GPUs beside {count} times one", speed, "tok/s",
                      int(count) * one, least=scaling.WORKS[work][3] if count == "2" else None)
        for count, plain in result["plain"].items():
            speed = result["canonical"][count]["tokens_per_second"]
            gpus = "1 GPU" if count == "1" else f"{count} GPUs"
            table.add(f"{work} on {gpus}, canonical beside -rw 1", speed, "tok/s",
                      plain["tokens_per_second"], least=1 / (1 + scaling.CANONICAL_COST[work]))
    return results


def measure_comm(args: argparse.Namespace, table: Table) -> dict:
    small = "--models custom:L2C64H4T64V512 --one 1 --raw 1 --repeats 2".split()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "comm.json"
        command = ["dev/bench/comm.sh", *(small if args.cpu else []), "--json", str(report)]
        print("$ " + " ".join(command), flush=True)
        environment = {**os.environ, "PROGRAM": args.comm_program}
        subprocess.run(command, env=environment, check=True, timeout=TIME_LIMIT_S)
        results = json.loads(report.read_text())
    for target in results["targets"]:
        table.add(target["what"], target["value"], "of it", least=target["least"])
    return results


def measure_start(args: argparse.Namespace, table: Table) -> dict:
    command = [args.trainer, *trainer_flags(args), "-v", "0", "-x", "1"]
    seconds = []
    for _ in range(STARTS):
        steps = [at for at, line in timed_lines(command) if line.startswith("step ")]
        seconds.append(steps[0])
    table.add("start: exec to the first step's line, d12 B 64", statistics.median(seconds), "s",
              most=START_LIMIT_S)
    return {"command": " ".join(command), "seconds": seconds}


def measure_validation(args: argparse.Namespace, table: Table) -> dict:
    """Validation takes the time from a step's line to the loss that follows it: AdamW's end, about
    a millisecond, is in it."""
    flags, micro_batches = trainer_flags(args), 3 if args.cpu else args.micro_batches
    per_batch = int(flags[flags.index("-b") + 1]) * int(flags[flags.index("-t") + 1])
    data = Path(args.data).with_name("validation.bin")
    write_random_tokens(data, per_batch * micro_batches + 1, CPU_VOCAB if args.cpu else VOCAB)
    flags += ["-m", str(micro_batches), "-j", str(data)]
    command = [args.trainer, *flags, "-v", "1", "-x", str(VALIDATIONS - 1)]
    seconds, began = [], None
    lines = timed_lines(command)
    for at, line in lines:
        if line.startswith("step "):
            began = at
        elif line.startswith("val loss ") and began is not None:
            seconds.append(at - began)
            began = None
    used = re.findall(r", (\d+) micro-batches used", "\n".join(line for _, line in lines))
    if used != [str(micro_batches)] or len(seconds) != VALIDATIONS - 1:
        raise SystemExit(f"validation used {used} micro-batches, and came {len(seconds)} times "
                         f"behind a step; {micro_batches} and {VALIDATIONS - 1} were asked for")
    speeds = [per_batch * micro_batches / s for s in seconds]
    forward_command = [args.forward_program, *flags, "-v", "0"]
    forward = [float(speed) for speed in FORWARD_LINE.findall(text_of(forward_command))][1:]
    table.add("validation beside the forward pass alone, d12 B 64", statistics.median(speeds),
              "tok/s", statistics.median(forward), least=LEAST_OF_FORWARD)
    return {"command": " ".join(command), "tokens_per_second": speeds,
            "forward_command": " ".join(forward_command), "forward_tokens_per_second": forward}


def measure_memory(args: argparse.Namespace, table: Table) -> dict:
    results = {}
    for level, of_llmc in LLMC_MEMORY.items():
        command = [args.trainer, *trainer_flags(args), "-d", "1024" if args.cpu else "524288"]
        command += ["-v", "0", "-x", "1", "-r", str(level), "--dry-run"]
        text = text_of(command)
        whole = float(MEMORY_LINE.findall(text)[-1])
        spares = sum(map(float, SPARE_LINE.findall(text)))
        table.add(f"memory, d12 B 64 -r {level}, beside llm.c's and spares", whole, "MiB",
                  of_llmc + spares, most=1.0)
        results[f"-r {level}"] = {"command": " ".join(command), "mib": whole, "spares": spares,
                                  "llm.c": of_llmc}
    return results


PARTS: dict[str, Callable[[argparse.Namespace, Table], dict]] = {
    "memory": measure_memory,
    "start": measure_start,
    "validation": measure_validation,
    "torch": measure_torch,
    "comm": measure_comm,
    "scaling": measure_scaling,
}


def missing_for(part: str, args: argparse.Namespace) -> str:
    """What this machine lacks for a part; empty when nothing."""
    if part in ("comm", "scaling") and args.gpus < 2:
        return f"needs two GPUs, there is {args.gpus}"
    program = {"comm": args.comm_program, "validation": args.forward_program}.get(part)
    if program is not None and not os.access(program, os.X_OK):
        return f"needs {program or 'its program'}, which is not built: make bench builds it"
    known = {"torch": list(compare_torch.WORKS), "scaling": scaling.DEFAULT_WORKS}.get(part)
    if known is not None and not works_among(args, known):
        return "has none of --works"
    return ""


def parse_arguments() -> argparse.Namespace:
    works = list(dict.fromkeys([*compare_torch.WORKS, *scaling.DEFAULT_WORKS]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--works", nargs="+", choices=works, help="of torch and scaling")
    parser.add_argument("--trainer", help="default: ./train_gpt2cu; with --cpu ./train_gpt2cpu")
    parser.add_argument("--trainer-args", default="-r 0", help="for torch and scaling")
    parser.add_argument("--forward-program", default="", help="bench_forward, as make builds it")
    parser.add_argument("--comm-program", default="", help="bench_comm, likewise")
    parser.add_argument("--data", help="token file (default: random tokens)")
    parser.add_argument("--way", choices=["mpi", "tcp", "fs"], help="as of scaling.py")
    parser.add_argument("--steps", type=whole_number(1), default=20,
                        help="as of the scripts of the parts")
    parser.add_argument("--warmup", type=whole_number(0), default=5)
    parser.add_argument("--micro-batches", type=whole_number(1), default=200,
                        help="of one validation")
    parser.add_argument("--commit", help="what to record where the tree came without .git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--strict", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--cpu", action="store_true", help="a small model, to try this script")
    args = parser.parse_args()
    check_out(parser, args.out)
    args.out = args.out.resolve()
    check_data(parser, args.data, ROOT)
    args.gpus = 2 if args.cpu else count_gpus()
    if args.gpus > 0:
        settle_trainer(parser, args)
    return args


def main() -> None:
    args = parse_arguments()
    if args.gpus == 0:
        raise SystemExit("error: no GPU here; make bench_cpu measures the CPU build")
    os.chdir(ROOT)
    if args.data is None:
        args.data = f"build/bench/random{'-cpu' if args.cpu else ''}.bin"
        write_random_tokens(Path(args.data), TOKENS, CPU_VOCAB if args.cpu else VOCAB)
    record = {**machine_record(args), "gpus": args.gpus, "parts": {}, "left_out": {}, "failed": {}}
    args.gpu = record["gpu"]
    table = Table()
    for part in args.parts:
        lacks = missing_for(part, args)
        if lacks:
            record["left_out"][part] = lacks
            print(f"{part}: left out: {lacks}")
            continue
        print(f"\n---- {part}", flush=True)
        start = time.monotonic()
        try:
            record["parts"][part] = PARTS[part](args, table)
            print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
        except (Exception, SystemExit) as error:  # the other parts are worth having
            record["failed"][part] = str(error) or repr(error)
            print(f"{part}: FAILED: {record['failed'][part]}", flush=True)
    record["table"] = table.rows
    table.print()
    if any(result["peer"] is None for result in record["parts"].get("torch", {}).values()):
        print(compare_torch.NO_TORCH)
    for kind in ("left_out", "failed"):
        for part, why in record[kind].items():
            print(f"{part}: {kind.replace('_', ' ')}: {why}")
    if args.cpu:
        print("a small model on the CPU: no figure here says anything about a GPU")
    if record["parts"]:
        save(args.out, "cpu-trial" if args.cpu else "bench", record)
    else:
        print("nothing was measured: no result file is written")
    if record["failed"] or (args.strict and not table.all_met()):
        sys.exit(1)


if __name__ == "__main__":
    main()
