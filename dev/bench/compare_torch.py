"""The trainer beside PyTorch (dev/bench/torch_gpt2.py) on one GPU: speed, memory, losses.

    python3 dev/bench/compare_torch.py                     all works, one after the other
    python3 dev/bench/compare_torch.py --works d12 d48     some
    python3 dev/bench/compare_torch.py --losses            100 steps of d12, losses of both

Runs from the repository's root; paths are as seen from there. Both read the same random tokens.
Times are medians over the steps after the first few. Results go into one JSON file in
dev/bench/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_tokens import write_random_tokens

ROOT = Path(__file__).resolve().parents[2]
SEQ = 1024
TOKENS = 1 << 23
# Name: model, sequences in a micro-batch, tokens in a step.
WORKS = {
    "d12": ("d12", 64, 524288),
    "d12-b4": ("d12", 4, 32768),
    "d24": ("d24", 32, 262144),
    "d48": ("d48", 16, 131072),
}
STEP_LINE = re.compile(r"^step .*\| loss (\S+) .*\| ([\d.]+) ms \|", re.MULTILINE)
MEMORY_LINE = re.compile(r"^\| sum .*\| +([\d.]+) \|$", re.MULTILINE)
LOSS_WORK, LOSS_STEPS, LOSS_WARMUP = "d12-b4", 100, 5


def run(command: list[str]) -> str:
    """Its standard output; ends the program with the command's own message when it fails."""
    print("$ " + " ".join(command), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if result.returncode != 0:
        print(result.stdout[-4000:])
        raise SystemExit(f"error: {command[0]} ended with status {result.returncode}")
    return result.stdout


def output_of(*command: str) -> str:
    """Its standard output without white space at the ends, or "unknown"."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def trainer_command(args: argparse.Namespace, work: str, model: str, steps: int) -> list[str]:
    _, batch, total = WORKS[work]
    command = [args.trainer, "-e", model, "-i", args.data, "-b", str(batch)]
    command += ["-t", str(SEQ), "-d", str(total), "-x", str(steps), "-l", "3e-4", "-v", "0"]
    return command + ["-s", "0", *args.trainer_args.split()]


def run_trainer(args: argparse.Namespace, work: str, model: str, steps: int) -> dict:
    """Median speed, memory and losses of the trainer; and what it says of its build."""
    with tempfile.TemporaryDirectory() as folder:
        command = trainer_command(args, work, model, steps)
        text = run([*command, "-o", folder])
        record = json.loads((Path(folder) / "run.json").read_text())
    lines = STEP_LINE.findall(text)
    if len(lines) != steps:
        raise SystemExit(f"error: {len(lines)} step lines of {steps}:\n{text[-2000:]}")
    median = statistics.median(float(ms) for _, ms in lines[args.warmup :])
    return {
        "command": " ".join(command),
        "tokens_per_second": WORKS[work][2] / median * 1e3,
        "median_ms": median,
        "memory_gib": float(MEMORY_LINE.findall(text)[-1]) / 1024,
        "losses": [float(loss) for loss, _ in lines],
        "commit": record["commit"],
        "build": record["build"],
        "libraries": record["libraries"],
        "device": record["device"],
    }


def run_torch(args: argparse.Namespace, work: str, steps: int, more: list[str]) -> dict:
    """Likewise of PyTorch."""
    model, batch, total = WORKS[work]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "torch.json"
        command = ["dev/bench/torch_gpt2.py", "--model", model, "--data", args.data]
        command += ["--batch", str(batch), "--total", str(total), "--steps", str(steps)]
        command += ["--warmup", str(args.warmup), "--seq", str(SEQ), *more]
        run([sys.executable, *command, "--json", str(report)])
        result = json.loads(report.read_text())
    return {"command": " ".join(["python3", *command]), **result}


def compare_speed(args: argparse.Namespace) -> dict:
    """Each work by both; prints a table."""
    results = {}
    for work in args.works:
        ours = run_trainer(args, work, WORKS[work][0], args.steps)
        theirs = run_torch(args, work, args.steps, [])
        for result in (ours, theirs):
            del result["losses"]
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        results[work] = {"trainer": ours, "torch": theirs, "ratio": ratio}
    print(f"\n{'work':8} {'trainer tok/s':>14} {'torch tok/s':>12} {'ratio':>6} "
          f"{'trainer GiB':>12} {'torch GiB':>10}")
    for work, result in results.items():
        ours, theirs = result["trainer"], result["torch"]
        print(f"{work:8} {ours['tokens_per_second']:14.0f} {theirs['tokens_per_second']:12.0f} "
              f"{result['ratio']:6.3f} {ours['memory_gib']:12.1f} {theirs['memory_gib']:10.1f}")
    return results


def compare_losses(args: argparse.Namespace) -> dict:
    """Both from one model file over the same tokens; prints the largest difference."""
    model = "build/bench/start.bin"
    (ROOT / model).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        start = trainer_command(args, LOSS_WORK, WORKS[LOSS_WORK][0], 1)
        run([*start, "-o", folder, "-n", "1"])
        shutil.copy(Path(folder) / "model_00000001.bin", ROOT / model)
    ours = run_trainer(args, LOSS_WORK, model, LOSS_STEPS)
    theirs = run_torch(args, LOSS_WORK, LOSS_STEPS, ["--weights", model, "--exact-vocab"])
    differences = [a - b for a, b in zip(ours["losses"], theirs["losses"])]
    largest = max(differences, key=abs)
    step = differences.index(largest)
    print(f"\n{'step':>6} {'trainer':>10} {'torch':>10} {'difference':>11}")
    for i in sorted({0, LOSS_STEPS // 10, LOSS_STEPS // 2, LOSS_STEPS - 1, step}):
        a, b = ours["losses"][i], theirs["losses"][i]
        print(f"{i + 1:6} {a:10.6f} {b:10.6f} {a - b:11.6f}")
    print(f"largest difference of {LOSS_STEPS} losses: {largest:.6f} at step {step + 1}")
    return {"trainer": ours, "torch": theirs, "largest_difference": largest, "step": step + 1}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--losses", action="store_true", help="compare losses instead of speed")
    parser.add_argument("--trainer", default="./train_gpt2cu")
    parser.add_argument("--trainer-args", default="", help="more flags for it, such as '-r 0'")
    parser.add_argument("--data", help="token file (default: random tokens)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps left out of the median")
    parser.add_argument("--out", type=Path, default=ROOT / "dev" / "bench" / "results")
    args = parser.parse_args()
    if args.steps <= args.warmup:
        parser.error("--steps must be more than --warmup")
    return args


def main() -> None:
    args = parse_arguments()
    if args.data is None:
        args.data = "build/bench/random.bin"
        write_random_tokens(ROOT / args.data, TOKENS)
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    start = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    record = {
        "date": start,
        "gpu": output_of(*query).splitlines()[0],
        "cpu": output_of("sh", "-c", "sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1"),
        "system": platform.platform(),
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "trainer": output_of(str(ROOT / args.trainer), "--version"),
    }
    kind = "losses" if args.losses else "speed"
    record[kind] = compare_losses(args) if args.losses else compare_speed(args)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"torch-{kind}-{start}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
