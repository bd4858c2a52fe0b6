"""Draws the loss curves of one or several training logs as a PNG.

A log has lines 's:STEP trl:LOSS lr:RATE norm:NORM' (training), 's:STEP tel:LOSS' (validation) and
's:STEP eval:ACCURACY' (HellaSwag). After a restart a step may stand in it twice; the later line
counts. The title comes from run.json beside the log, if there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

missing_package: str | None = None  # said after --help
try:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a $ in a title or a folder's name is a $
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ModuleNotFoundError as missing:
    missing_package = missing.name

# Okabe and Ito's palette: distinct for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, GRID = "#333333", "#E4E4E4"

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
TRAINING = rf"trl:({NUMBER})(?: lr:{NUMBER})?(?: norm:{NUMBER})?"
LINE = re.compile(rf"s:(\d+) (?:tel:({NUMBER})|eval:({NUMBER})|{TRAINING})")


class LogError(Exception):
    """An error the user can act on; its text is one line."""


@dataclass
class Log:
    """Values of one log by step."""

    name: str
    train: dict[int, float] = field(default_factory=dict)
    val: dict[int, float] = field(default_factory=dict)
    hellaswag: dict[int, float] = field(default_factory=dict)
    run: dict[str, object] = field(default_factory=dict)


def read_log(path: Path) -> Log:
    """Reads a main.log, or the main.log of a folder, and run.json beside it."""
    path = path / "main.log" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise LogError(f"{path}: no such file; expected a main.log or its folder") from None
    except UnicodeDecodeError:
        raise LogError(f"{path}: not a text file; expected a main.log") from None
    log = Log(path.resolve().parent.name)
    for number, line in enumerate(lines, start=1):
        match = LINE.fullmatch(line.strip())
        if match:
            for values, text in zip((log.val, log.hellaswag, log.train), match.groups()[1:]):
                if text is not None:
                    values[int(match[1])] = float(text)
        elif line.strip():
            raise LogError(
                f"{path}:{number}: {line.strip()[:60]!r}: expected 's:STEP tel:LOSS',"
                " 's:STEP eval:ACCURACY' or 's:STEP trl:LOSS lr:RATE norm:NORM'"
            )
    if not (log.train or log.val):
        raise LogError(f"{path}: no training or validation loss in it")
    log.run = read_run(path.with_name("run.json"))
    return log


def read_run(path: Path) -> dict[str, object]:
    """The object in run.json; empty when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LogError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(value, dict):
        raise LogError(f"{path}: expected a JSON object")
    return value


def make_title(log: Log) -> str:
    """Model, precision, batch and devices as run.json has them; else the folder's name."""
    options, build = (
        value if isinstance(value := log.run.get(key), dict) else {} for key in ("options", "build")
    )
    parts: list[str] = []
    if model := options.get("model"):
        parts.append(Path(str(model)).name)
    if precision := build.get("precision"):
        parts.append(str(precision))
    batch = options.get("total_batch")
    if isinstance(batch, int) and batch > 0:
        parts.append(f"{batch:,} tokens a step")
    processes, device = log.run.get("num_processes"), log.run.get("device")
    if isinstance(processes, int):
        parts.append(f"{processes} \u00d7 {device}" if device else f"{processes} processes")
    return ", ".join(parts) or f"Training run: {log.name}"


def smooth(values: list[float], span: int) -> list[float]:
    """Moving mean over up to `span` values (an odd number), blind to nan and inf.

    Near the start the window shrinks on both sides, since the loss falls steeply there; at the
    end it only loses its right half.
    """
    sums, counts = [0.0], [0]
    for value in values:
        good = math.isfinite(value)
        sums.append(sums[-1] + (value if good else 0.0))
        counts.append(counts[-1] + good)
    result = []
    for i in range(len(values)):
        reach = min(span // 2, i)
        low, high = i - reach, min(i + reach + 1, len(values))
        count = counts[high] - counts[low]
        result.append((sums[high] - sums[low]) / count if count else math.nan)
    return result


def style_axes(axes: Axes) -> None:
    """Light grid, no box."""
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(colors=INK, length=3)


def draw_losses(axes: Axes, logs: list[Log], span: int | None) -> None:
    """Training loss, light and smoothed, and validation loss as points."""
    for number, log in enumerate(logs):
        colour = COLOURS[number % len(COLOURS)]
        prefix = f"{log.name}: " if len(logs) > 1 else ""
        if log.train:
            steps = sorted(log.train)
            values = [log.train[step] for step in steps]
            width = (span or max(1, len(values) // 40)) // 2 * 2 + 1
            label = f"{prefix}training" + (f" (mean of {width})" if width > 1 else "")
            if width > 1:
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
            axes.plot(steps, smooth(values, width), color=colour, linewidth=1.8, label=label)
        if log.val:
            steps = sorted(log.val)
            values = [log.val[step] for step in steps]
            point = colour if len(logs) > 1 else COLOURS[1]
            axes.plot(
                steps,
                values,
                "o",
                color=point,
                markersize=5,
                markeredgecolor="white",
                markeredgewidth=0.8,
                linestyle="none",
                label=f"{prefix}validation",
            )
    axes.set_ylabel("loss (nats a token, log scale)", color=INK)
    set_loss_scale(axes, logs)
    axes.legend(frameon=False, labelcolor=INK)


def set_loss_scale(axes: Axes, logs: list[Log]) -> None:
    """A logarithmic scale: on a linear one the first steps leave no room for all the others."""
    values = [
        value
        for log in logs
        for value in (*log.train.values(), *log.val.values())
        if math.isfinite(value)
    ]
    if not values:
        raise LogError("no finite loss in the logs")
    if min(values) <= 0:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def draw_hellaswag(axes: Axes, logs: list[Log]) -> None:
    """HellaSwag accuracy, with the line of pure chance."""
    axes.axhline(0.25, color="#999999", linewidth=1, linestyle=":", label="chance")
    for number, log in enumerate(logs):
        if log.hellaswag:
            steps = sorted(log.hellaswag)
            values = [log.hellaswag[step] for step in steps]
            colour = COLOURS[number % len(COLOURS)] if len(logs) > 1 else COLOURS[2]
            label = log.name if len(logs) > 1 else None
            axes.plot(
                steps,
                values,
                "o-",
                color=colour,
                linewidth=1.2,
                markersize=5,
                markeredgecolor="white",
                markeredgewidth=0.8,
                label=label,
            )
    axes.set_ylabel("HellaSwag accuracy", color=INK)
    axes.legend(frameon=False, labelcolor=INK)


def make_figure(logs: list[Log], span: int | None, title: str | None) -> Figure:
    """The whole picture: losses, and HellaSwag below when a log has it."""
    with_hellaswag = any(log.hellaswag for log in logs)
    figure, grid = plt.subplots(
        2 if with_hellaswag else 1,
        1,
        figsize=(9, 7 if with_hellaswag else 5),
        sharex=True,
        squeeze=False,
        height_ratios=(2.2, 1) if with_hellaswag else (1,),
        layout="constrained",
    )
    axes = list(grid[:, 0])
    draw_losses(axes[0], logs, span)
    if with_hellaswag:
        draw_hellaswag(axes[1], logs)
    for each in axes:
        style_axes(each)
    axes[-1].set_xlabel("step", color=INK)
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes[0].set_title(
        textwrap.fill(title or (make_title(logs[0]) if len(logs) == 1 else "Training runs"), 72),
        loc="left",
        color=INK,
        fontsize=13,
        fontweight="bold",
        pad=12,
    )
    return figure


class Parser(argparse.ArgumentParser):
    """argparse, except that a wrong command line is one line on stderr and status 1."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"error: {message} (see --help)\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="main.log or its folder")
    parser.add_argument(
        "--out", type=Path, metavar="PNG", help="output (default: loss.png beside the first log)"
    )
    parser.add_argument("--title", help="title instead of run.json's")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="mean over N logged steps, made odd; 1 is off (default: a fortieth of them)",
    )
    args = parser.parse_args()
    if args.smooth is not None and args.smooth < 1:
        parser.error(f"--smooth {args.smooth}: expected a whole number of at least 1")
    if args.out is None:
        first = args.logs[0]
        args.out = (first if first.is_dir() else first.parent) / "loss.png"
    if args.out.suffix.lower() != ".png":
        parser.error(f"--out {args.out}: expected a name that ends in .png")
    return args


def main() -> None:
    """Reads the logs, writes the picture, says where it is."""
    args = parse_arguments()
    if missing_package:
        sys.exit(
            f"error: Python package '{missing_package}' is missing;"
            f" run: {sys.executable} -m pip install matplotlib"
        )
    try:
        figure = make_figure([read_log(path) for path in args.logs], args.smooth, args.title)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out, dpi=150, facecolor="white")
    except LogError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or args.out}: {error.strerror or error}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
