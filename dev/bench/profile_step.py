"""Where the time of a training step goes on the GPU: a table of its kernels, by launcher.

    make profile                                               d12 -b 64 -d 131072
    make profile ARGS="-e d12 -b 64 -d 524288 -r 0"            another work, by the trainer's flags
    make profile ARGS="-b 4 -d 32768 --steps 1 --json FILE"

Runs from the repository's root. It starts the trainer on random tokens twice: as it is, for the
time of a step, and with dev/profile.cpp recording. After the warm-up it takes the last steps, and
prints their average. A launcher's bytes and flops are the least that its shapes allow
(llmc/nvtx_range.cuh); its limit is the longer of bytes / --copy and flops / --flops. Recording
leaves kernels' durations as they are; the host needs a little longer for each launch, so gaps may
be longer than without.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Sequence

from compare_torch import STEP_LINE, machine_record, place_to_write
from random_tokens import check_data, whole_number, write_random_tokens
from ranks import JobError, count_gpus, plan_row, run_job

TOKENS = 1 << 23
PHASES = ("forward", "backward", "update")
OUTSIDE, NCCL, COPIES = "outside any launcher", "NCCL", "copies and fills"
TIME_LIMIT_S = 400


# ---- the recorded file ----


@dataclass
class Work:
    """A kernel, copy or fill. Times in ns."""

    kind: str
    start: int
    end: int
    stream: int
    range: int
    call: int
    in_graph: bool
    detail: int

    @property
    def time(self) -> int:
        return self.end - self.start


@dataclass
class Recording:
    texts: dict[int, str] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    lost: int = 0

    def chain(self, number: int) -> list[int]:
        """The range and those around it, innermost first."""
        found = []
        while number in self.texts:
            found.append(number)
            number = self.parents[number]
        return found

    def launcher(self, work: Work) -> int:
        """The innermost launcher's range, 0 without one."""
        chain = self.chain(work.range)
        return next((n for n in chain if self.texts[n].startswith("launcher ")), 0)

    def phase(self, work: Work) -> str:
        chain = self.chain(work.range)
        return next((self.texts[n] for n in chain if self.texts[n] in PHASES), "")

    def name(self, work: Work) -> str:
        return self.names[work.detail] if work.kind == "kernel" else work.kind

    def is_nccl(self, work: Work) -> bool:
        return work.kind == "kernel" and self.name(work).startswith(("nccl", "void nccl"))


def read_recording(lines: list[str]) -> Recording:
    """What dev/profile.cpp wrote. Raises ValueError when the end is missing."""
    recording = Recording()
    if not lines or lines[-1] != "end":
        raise ValueError("the recording has no end")
    for line in lines[:-1]:
        kind, *fields = line.split("\t")
        if kind == "range":
            recording.texts[int(fields[0])] = fields[2]
            recording.parents[int(fields[0])] = int(fields[1])
        elif kind == "name":
            recording.names[int(fields[0])] = fields[1]
        elif kind == "lost":
            recording.lost = int(fields[0])
        else:
            start, end, stream, number, call, in_graph, detail = map(int, fields)
            recording.work.append(
                Work(kind, start, end, stream, number, call, in_graph == 1, detail))
    recording.work.sort(key=lambda work: (work.start, work.end))
    return recording


def step_windows(recording: Recording) -> list[tuple[int, int]]:
    """Begin and end of each step but the first, which has no step before it.

    A step ends with the last kernel that a launcher queued in its update; NCCL's may end later.
    """
    ends: dict[int, int] = {}
    for work in recording.work:
        if work.kind != "kernel" or not recording.launcher(work):
            continue
        for number in recording.chain(work.range):
            if recording.texts[number] == "update":
                ends[number] = max(ends.get(number, 0), work.end)
    marks = [ends[number] for number in sorted(ends)]
    return list(zip(marks, marks[1:]))


# ---- the report ----


@dataclass
class Model:
    """What the trainer's table at the start says."""

    layers: int
    channels: int
    padded_vocab: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    master: bool
    shards: int  # of the optimizer's state


def read_model(output: str, flags: list[str]) -> Model:
    def row(name: str) -> str:
        found = plan_row(output, name)
        if found is None:
            raise SystemExit(f"error: the trainer printed no row {name!r}:\n{output[-2000:]}")
        return found

    model = re.match(r"(\d+) layers, (\d+) channels, .* in (\d+)", row("model"))
    precision = re.match(r"(\w+), gradients (\w+)", row("precision"))
    processes = re.match(r"(\d+), ZeRO stage (\d)", row("processes"))
    wide = precision[1] == "FP32"
    return Model(
        layers=int(model[1]), channels=int(model[2]), padded_vocab=int(model[3]),
        parameters=int(row("parameters")),
        weight_bytes=4 if wide else 2,
        gradient_bytes=4 if precision[2] == "FP32" else 2,
        master=not wide and not ("-w" in flags and flags[flags.index("-w") + 1] == "0"),
        shards=int(processes[1]) if processes[2] == "1" else 1,
    )


def label_of(text: str, model: Model) -> str:
    """A launcher's name, with the product's or LayerNorm's place in the model where shapes tell."""
    name = text.split()[1]
    if not name.startswith("matmul"):
        return name
    sizes = {key: int(value) for key, value in re.findall(r" (\w+)=(\d+)", text)}
    C = model.channels
    places = {(C, 3 * C): "qkv", (C, C): "attproj", (C, 4 * C): "fc", (4 * C, C): "fcproj",
              (C, model.padded_vocab): "LM head"}
    return f"{name} {places.get((sizes['C'], sizes['OC']), '')}".strip()


def table_bytes(label: str, model: Model) -> float:
    """Bytes a step of a launcher whose table of tensors is in device memory."""
    gradients = model.parameters * model.gradient_bytes
    if label == "global_norm_chunks":
        return gradients / model.shards
    if label == "adamw_update":  # m, v and master read and written, the weight written
        w = model.weight_bytes
        each = model.gradient_bytes + 16 + (8 + w if model.master else 2 * w)
        return each * model.parameters / model.shards
    return 0.0


def short_name(name: str) -> str:
    """A kernel's name without what stands around and behind it."""
    name = re.sub(r"^void ", "", name)
    while "(" in name and name.endswith(")"):
        name = name[: name.rindex("(")]
    outer = re.sub(r"<.*", "", name).split("::")[-1]
    if outer in ("Kernel", "Kernel2", "device_kernel"):  # CUTLASS: what it computes stands within
        outer = re.sub(r"[<>].*", "", name.partition("<")[2]).split("::")[-1]
    name = outer or name
    return name if len(name) <= 44 else name[:20] + "..." + name[-21:]


@dataclass
class Row:
    label: str
    time: int = 0
    calls: set = field(default_factory=set)
    kernels: int = 0
    in_graphs: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    ideal: float = 0.0  # s
    names: dict = field(default_factory=lambda: defaultdict(int))

    def record(self, steps: int, span: float) -> dict:
        """Averages of a step; `span` is its length in ns."""
        seconds = self.time / 1e9
        most = max(self.names, key=self.names.__getitem__)
        return {
            "launcher": self.label,
            "calls": len(self.calls) / steps,
            "kernels": self.kernels / steps,
            "kernels_in_graphs": self.in_graphs / steps,
            "ms": self.time / steps / 1e6,
            "share": self.time / steps / span,
            "gb_per_s": self.bytes / seconds / 1e9 if self.bytes else None,
            "tflop_per_s": self.flops / seconds / 1e12 if self.flops else None,
            "of_limit": self.ideal / seconds if self.ideal else None,
            "kernel": short_name(most),
            "other_kernels": len(self.names) - 1,
            "kernel_ms": {name: time / steps / 1e6 for name, time in self.names.items()},
        }


@dataclass
class Limits:
    copy: float  # bytes a second
    flops: float  # a second


def ideal_seconds(bytes_moved: float, flops: float, limits: Limits) -> float:
    return max(bytes_moved / limits.copy, flops / limits.flops)


def add_to_rows(rows: dict[str, Row], recording: Recording, work: Work, model: Model,
                limits: Limits) -> None:
    number = recording.launcher(work)
    text = recording.texts.get(number, "")
    if work.kind != "kernel":
        label = COPIES
    elif recording.is_nccl(work):
        label = NCCL
    else:
        label = label_of(text, model) if number else OUTSIDE
    row = rows.setdefault(label, Row(label))
    row.time += work.time
    row.kernels += work.kind == "kernel"
    row.in_graphs += work.in_graph
    row.names[recording.name(work)] += work.time
    if label in (OUTSIDE, NCCL, COPIES):
        row.calls.add((work.call, work.start))
        row.bytes += work.detail if label == COPIES else 0
        return
    # A range that was captured is queued again with each launch of its graph.
    call = (number, work.call if work.in_graph else 0)
    if call in row.calls:
        return
    row.calls.add(call)
    sizes = {key: float(value) for key, value in re.findall(r" (\w+)=(\d+)", text)}
    row.bytes += sizes["bytes"]
    row.flops += sizes["flops"]
    row.ideal += ideal_seconds(sizes["bytes"], sizes["flops"], limits)


def gaps_of(kernels: list[Work], begin: int, end: int) -> list[tuple[int, Work | None]]:
    """Times within the window in which no kernel runs, each with the kernel that ends it.

    `kernels` are in order of their starts.
    """
    gaps: list[tuple[int, Work | None]] = []
    covered = begin
    for work in kernels:
        if work.start > covered:
            gaps.append((work.start - covered, work))
        covered = max(covered, work.end)
    if end > covered:
        gaps.append((end - covered, None))
    return gaps


def report(recording: Recording, model: Model, limits: Limits, steps: int) -> dict:
    """The last `steps` steps, averaged. Raises ValueError when there are fewer."""
    windows = step_windows(recording)
    if len(windows) < steps:
        raise ValueError(f"{len(windows)} whole steps were recorded, {steps} are wanted: no kernel "
                         "has a range, or the run was too short")
    windows = windows[-steps:]
    span = (windows[-1][1] - windows[0][0]) / steps
    rows: dict[str, Row] = {}
    phases = {name: {"ms": 0.0, "kernels": 0.0, "idle_ms": 0.0} for name in (*PHASES, "other")}
    gaps: list[tuple[int, str]] = []
    launches, kernels_in_all, in_graphs, kernel_time = 0, 0, 0, 0
    for begin, end in windows:
        inside = [work for work in recording.work if begin <= work.start < end]
        kernels = [work for work in inside if work.kind == "kernel"]
        launches += len({work.call for work in inside})
        kernels_in_all += len(kernels)
        in_graphs += sum(work.in_graph for work in kernels)
        for work in inside:
            add_to_rows(rows, recording, work, model, limits)
        for work in kernels:
            if recording.is_nccl(work):
                continue
            kernel_time += work.time
            phase = phases[recording.phase(work) or "other"]
            phase["ms"] += work.time / steps / 1e6
            phase["kernels"] += 1 / steps
        for length, work in gaps_of(kernels, begin, end):
            phase = phases[(recording.phase(work) if work else "update") or "other"]
            phase["idle_ms"] += length / steps / 1e6
            gaps.append((length, short_name(recording.name(work)) if work else "the step's end"))
    for label, row in rows.items():
        if row.bytes == 0 and label not in (OUTSIDE, NCCL):
            # The norm and AdamW go through all tensors once a step.
            row.bytes = steps * table_bytes(label, model)
            row.ideal = ideal_seconds(row.bytes, 0.0, limits)
    records = sorted((row.record(steps, span) for row in rows.values()), key=lambda r: -r["ms"])
    gaps.sort(key=lambda gap: -gap[0])
    return {
        "steps": steps,
        "step_ms": span / 1e6,
        "kernels_ms": kernel_time / steps / 1e6,
        "nccl_ms": rows[NCCL].time / steps / 1e6 if NCCL in rows else 0.0,
        "idle_ms": sum(length for length, _ in gaps) / steps / 1e6,
        "longest_gaps_us": [[length / 1e3, before] for length, before in gaps[:5]],
        "launches": launches / steps,
        "kernels": kernels_in_all / steps,
        "kernels_in_graphs": in_graphs / steps,
        "ideal_ms": sum(row.ideal for row in rows.values()) / steps * 1e3,
        "lost_records": recording.lost,
        "phases": {name: phase for name, phase in phases.items()
                   if name != "other" or phase["kernels"]},
        "rows": records,
    }


def printed(result: dict) -> str:
    """The report as text."""
    def figure(value: float | None, width: int, digits: int) -> str:
        return f"{value:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"

    lines = [f"{'launcher':<36} {'calls':>7} {'ms':>9} {'share':>6} {'GB/s':>6} {'TFLOP/s':>7}"
             f" {'limit':>6}  kernel"]
    for row in result["rows"]:
        limit = f"{row['of_limit']:6.0%}" if row["of_limit"] is not None else "     -"
        others = f" +{row['other_kernels']}" if row["other_kernels"] else ""
        lines.append(
            f"{row['launcher']:<36} {row['calls']:7.0f} {row['ms']:9.3f} {row['share']:6.1%}"
            f" {figure(row['gb_per_s'], 6, 0)} {figure(row['tflop_per_s'], 7, 0)} {limit}"
            f"  {row['kernel']}{others}")
    step = result["step_ms"]
    lines += ["", f"step, recorded        {step:9.3f} ms, {result['steps']} averaged"]
    if result.get("plain_ms"):
        lines.append(f"step, not recorded    {result['plain_ms']:9.3f} ms, median")
    lines += [
        f"sum of kernels        {result['kernels_ms']:9.3f} ms, {result['kernels_ms'] / step:.1%}"
        " (without NCCL's)",
        f"NCCL kernels          {result['nccl_ms']:9.3f} ms",
        f"no kernel runs        {result['idle_ms']:9.3f} ms, {result['idle_ms'] / step:.1%}",
        f"at the limits         {result['ideal_ms']:9.3f} ms, {result['ideal_ms'] / step:.1%}",
        f"launches              {result['launches']:9.0f}, kernels {result['kernels']:.0f}, "
        f"of these {result['kernels_in_graphs']:.0f} in graphs",
        "longest gaps          "
        + ", ".join(f"{us:.1f} us before {what}" for us, what in result["longest_gaps_us"]),
        "", f"{'phase':<10} {'ms':>9} {'share':>6} {'kernels':>8} {'idle ms':>9}",
    ]
    for name, phase in result["phases"].items():
        lines.append(f"{name:<10} {phase['ms']:9.3f} {phase['ms'] / step:6.1%}"
                     f" {phase['kernels']:8.0f} {phase['idle_ms']:9.3f}")
    lines.append("The LM head's forward product and the classifier belong to backward.")
    return "\n".join(lines + warnings_of(result))


def warnings_of(result: dict) -> list[str]:
    """What makes the table less than it should be."""
    found = []
    outside = [row for row in result["rows"] if row["launcher"] == OUTSIDE]
    for row in outside:
        names = ", ".join(sorted({short_name(name) for name in row["kernel_ms"]})[:5])
        found.append(f"warning: {row['kernels']:.0f} kernels of a step, {row['ms']:.3f} ms, are "
                     f"outside any launcher ({names})"
                     + ("; CUPTI does not tell graphs' kernels apart here: try -cg 0"
                        if row["kernels_in_graphs"] else ""))
    if result["lost_records"]:
        found.append(f"warning: CUPTI lost {result['lost_records']} records of the run")
    return found


# ---- the run ----


def run_trainer(args: argparse.Namespace, flags: list[str],
                rank_env: Sequence[Mapping[str, str]] = ()) -> str:
    """Rank 0's standard output."""
    print("$ " + " ".join([args.trainer, *flags]), flush=True)
    way = "fs" if args.ranks > 1 else ""
    try:
        run = run_job(args.trainer, args.ranks, way, flags, TIME_LIMIT_S, rank_env=rank_env)
    except JobError as error:
        raise SystemExit(f"error: {error}") from None
    if set(run.statuses) != {0}:
        raise SystemExit(f"error: the trainer failed\n{run}")
    for line in sorted(set("".join(run.errors).splitlines())):
        print(line, file=sys.stderr)
    return run.stdout


def measure(args: argparse.Namespace) -> dict:
    count = args.warmup + args.steps
    flags = ["-e", "d12", "-b", "64", "-t", "1024", "-d", "131072", "-i", args.data, "-l", "3e-4",
             "-v", "0", "-s", "0"]
    given = dict(zip(args.flags[::2], args.flags[1::2]))
    # A flag may stand only once.
    flags = [part for i in range(0, len(flags), 2) if flags[i] not in given
             for part in flags[i : i + 2]]
    flags += [*args.flags, "-x", str(count)]
    plain_ms = None
    if not args.no_plain:
        lines = STEP_LINE.findall(run_trainer(args, flags))
        plain_ms = statistics.median(float(ms) for _, ms in lines[args.warmup :])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.tsv" for rank in range(args.ranks)]
        library = str(Path(args.library).resolve())
        output = run_trainer(args, flags, [
            {"NVTX_INJECTION64_PATH": library, "LLMC_PROFILE": str(file)} for file in files])
        if not files[0].exists():
            raise SystemExit(f"error: the trainer wrote no recording: {library} was not loaded, or "
                             "the trainer was built without NVTX")
        text = files[0].read_text()
    if args.keep:
        args.keep.parent.mkdir(parents=True, exist_ok=True)
        args.keep.write_text(text)
    try:
        result = report(read_recording(text.splitlines()), read_model(output, flags),
                        Limits(args.copy * 1e12, args.flops * 1e12), args.steps)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    return {"command": " ".join([args.trainer, *flags]), "ranks": args.ranks, "plain_ms": plain_ms,
            "limits": {"copy_tb_per_s": args.copy, "tflop_per_s": args.flops}, **result}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False,
        epilog="All other arguments are the trainer's, such as -e d12 -b 64 -d 524288 -r 0.")
    parser.add_argument("--trainer", default="./train_gpt2cu")
    parser.add_argument("--library", default="build/profile/libprofile.so")
    parser.add_argument("--data", help="token file (default: random tokens)")
    parser.add_argument("--ranks", type=whole_number(1), default=1,
                        help="processes; rank 0's step is shown")
    parser.add_argument("--warmup", type=whole_number(4), default=5,  # graphs: steps 1 and 2
                        help="steps before, at least 4")
    parser.add_argument("--steps", type=whole_number(1), default=2, help="steps that are averaged")
    parser.add_argument("--copy", type=float, default=4.2, help="TB/s of a copy (default: H200)")
    parser.add_argument("--flops", type=float, default=790.0,
                        help="TFLOP/s of the tensor cores (default: H200, dense bf16, measured)")
    parser.add_argument("--no-plain", action="store_true", help="leave out the run unrecorded")
    parser.add_argument("--keep", type=Path, help="where to keep the recording")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--commit", help="for a tree without history")
    args, args.flags = parser.parse_known_args()
    for option, value in (("--copy", args.copy), ("--flops", args.flops)):
        if not 0 < value < math.inf:
            parser.error(f"{option} {value}: must be more than 0")
    for option, file in (("--trainer", args.trainer), ("--library", args.library)):
        if not Path(file).is_file():
            parser.error(f"{option} {file}: not found; `make profile` builds it")
    if not os.access(args.trainer, os.X_OK):
        parser.error(f"--trainer {args.trainer}: must be a program")
    check_data(parser, args.data)
    if args.ranks > 1 and args.ranks > (gpus := count_gpus()):
        parser.error(f"--ranks {args.ranks}: at most one a GPU, and there are {gpus}")
    for option, path in (("--keep", args.keep), ("--json", args.json)):
        if path is not None:
            check_file(parser, option, path)
    return args


def check_file(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """An error when it can't be written: before the run, not behind it."""
    if path.is_dir() or not place_to_write(path.parent)[1]:
        parser.error(f"{option} {path}: must be a file in a folder to write to")


def main() -> None:
    args = parse_arguments()
    if args.data is None:
        args.data = "build/bench/random.bin"
        write_random_tokens(Path(args.data), TOKENS)
    record = {**machine_record(args), "profile": measure(args)}
    print(f"\n{record['gpu']}; {record['trainer']}\n\n{printed(record['profile'])}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
