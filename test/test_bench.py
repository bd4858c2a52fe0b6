"""The benchmarks' scripts, on small models: what they start, read, compare and write. No speed is
tested here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from helpers import REPO_ROOT, Trainer, snapshot

BENCH = REPO_ROOT / "dev" / "bench"
sys.path.insert(0, str(BENCH))

import bench  # noqa: E402
import bench_cpu  # noqa: E402
import compare_torch  # noqa: E402
import scaling  # noqa: E402
from random_tokens import write_random_tokens  # noqa: E402

FIGURES = {"tok/s": {"layers, fp32, 1 rank": 1000.0}, "ms": {"gelu_forward, fp32": 2.0}}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_tokens(tmp_path_factory.mktemp("bench") / "random.bin", 1 << 15, 512)


def run_script(name: str, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def record_in(folder: Path) -> dict:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


# --------------------------------------------------------------------------------------- make bench


def test_all_parts_of_bench_on_a_small_model(fp32: Trainer, tokens: Path, tmp_path: Path) -> None:
    forward = fp32.binary.with_name("bench_forward")
    assert forward.exists(), "run: make bench_forward"
    result = run_script(
        "bench.py", "--cpu", "--trainer", fp32.binary, "--forward-program", forward,
        "--data", tokens, "--works", "d48", "--way", "fs", "--steps", 2, "--warmup", 1,
        "--out", tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = record_in(tmp_path)
    assert list(record["left_out"]) == ["comm"] and record["failed"] == {}
    assert list(record["parts"]) == ["memory", "start", "validation", "torch", "scaling"]
    rows = {row["row"]: row for row in record["table"]}
    assert {row for row in rows if row.startswith("d48")} == {
        "d48 beside PyTorch", "d48 on 2 GPUs beside 2 times one"}
    validation = rows["validation beside the forward pass alone, d12 B 64"]
    assert validation["figure"] > 0 and validation["peer"] > 0
    assert validation["ratio"] == pytest.approx(validation["figure"] / validation["peer"])
    for level, of_llmc in bench.LLMC_MEMORY.items():
        memory = record["parts"]["memory"][f"-r {level}"]
        row = rows[f"memory, d12 B 64 -r {level}, beside llm.c's and spares"]
        assert memory["spares"] > 0 and row["peer"] == of_llmc + memory["spares"]
        assert row["figure"] == memory["mib"] > memory["spares"]


def test_scaling_beside_every_gpu_by_itself(fp32: Trainer, tokens: Path) -> None:
    result = run_script("scaling.py", "--cpu", "--each", "--trainer", fp32.binary, "--data", tokens,
                        "--works", "d48", "--no-plain", "--way", "fs", "--steps", 2, "--warmup", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    one, two, *each = (float(speed) for speed in re.findall(r"(\d+) tok/s\b", result.stdout)[:4])
    assert len(each) == 2 and min(one, two, *each) > 0
    row = next(line for line in result.stdout.splitlines() if re.match(r"d48 +2 ", line))
    of_linear, of_each = (float(share) for share in re.findall(r"([\d.]+) %", row))
    # Speeds are printed without digits behind the point.
    of_one, of_sum = 0.5 / one + 0.5 / two, 1 / sum(each) + 0.5 / two
    assert of_linear == pytest.approx(100 * two / (2 * one), rel=1e-3 + of_one)
    assert of_each == pytest.approx(100 * two / sum(each), rel=1e-3 + of_sum)


def test_the_cost_of_the_canonical_order_in_turns(fp32: Trainer, tokens: Path) -> None:
    result = run_script("scaling.py", "--cpu", "--trainer", fp32.binary, "--data", tokens,
                        "--works", "d12-b4", "--counts", 1, "--turns", 3, "--steps", 2,
                        "--warmup", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    line = re.compile(r"^d12-b4 +N 1 (-rw 1)? .* median +([\d.]+) ms", re.M)
    runs = line.findall(result.stdout)
    assert [plain for plain, _ in runs] == ["", "-rw 1"] * 3
    canonical, plain = (statistics.median(float(ms) for how, ms in runs if how == which)
                        for which in ("", "-rw 1"))
    (cost,) = re.findall(r"([+-][\d.]+) %$", result.stdout, re.M)
    # Both are printed with two digits behind the point.
    assert float(cost) == pytest.approx(100 * (canonical / plain - 1), abs=2.0 / canonical + 0.01)


@pytest.mark.parametrize("script", ["scaling.py", "compare_torch.py"])
def test_a_trainer_that_is_not_there(script: str, tmp_path: Path) -> None:
    result = run_script(script, "--cpu", "--trainer", tmp_path / "none")
    assert result.returncode == 2
    assert "no such program; make train_gpt2cpu builds one" in result.stderr.splitlines()[-1]


def test_a_part_that_fails_leaves_the_others_and_gives_status_1(
    tokens: Path, tmp_path: Path
) -> None:
    trainer = tmp_path / "trainer"
    trainer.write_text("#!/bin/sh\ncase $* in *--dry-run) exit 1 ;; esac\necho 'step 1/1'\n")
    trainer.chmod(0o755)
    result = run_script("bench.py", "--cpu", "--trainer", trainer, "--data", tokens,
                        "--parts", "memory", "validation", "start", "--out", tmp_path / "out")
    assert result.returncode == 1
    record = record_in(tmp_path / "out")
    assert list(record["parts"]) == ["start"]
    assert record["failed"] == {"memory": f"{trainer} ended with status 1"}
    assert "make bench builds it" in record["left_out"]["validation"]


def test_a_run_in_which_every_part_failed_left_a_file(tokens: Path, tmp_path: Path) -> None:
    result = run_script("bench.py", "--cpu", "--trainer", "false", "--data", tokens,
                        "--parts", "memory", "validation", "start", "--out", tmp_path)
    assert result.returncode == 1 and "nothing was measured" in result.stdout
    assert not list(tmp_path.iterdir())


def test_bench_on_the_cpu_started_the_gpus_trainer(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tmp_path / "train_gpt2cpu"
    trainer.write_text("#!/bin/sh\n")
    trainer.chmod(0o755)
    monkeypatch.setattr(compare_torch, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--cpu", "--data", str(tokens)])
    assert bench.parse_arguments().trainer == "./train_gpt2cpu"


@pytest.mark.parametrize("module", [scaling, compare_torch])
def test_out_was_ignored_on_the_cpu(
    module: ModuleType, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO_ROOT)
    monkeypatch.setattr(scaling, "measure_work", lambda args, work: {
        "canonical": {}, "plain": {}, "share_of_linear": {}, "canonical_cost": {}})
    monkeypatch.setattr(compare_torch, "compare_speed", lambda args, gpu: {})
    words = ["--cpu", "--trainer", "true", "--data", str(tokens)]
    for out in ([], ["--out", str(tmp_path / "out")]):
        monkeypatch.setattr(sys, "argv", ["script", *words, *out])
        module.main()
        assert (tmp_path / "out").exists() == bool(out)
    assert record_in(tmp_path / "out")["command"].endswith(" --out " + str(tmp_path / "out"))


@pytest.mark.parametrize("script", [
    "bench.py", "bench_cpu.py", "compare_torch.py", "profile_step.py", "scaling.py"])
def test_data_that_is_no_token_file_was_the_trainers_error(script: str, tmp_path: Path) -> None:
    words = ["--trainer", "/bin/true"] if script != "bench_cpu.py" else []
    words += ["--library", "/bin/true"] if script == "profile_step.py" else []
    words += ["--cpu"] if script in ("bench.py", "compare_torch.py", "scaling.py") else []
    (tmp_path / "text").write_text("First Citizen: " * 100)
    (tmp_path / "short").write_bytes((20240520).to_bytes(4, "little"))
    for name, part in (("none", "no such file"), (".", "no such file"),
                       ("text", "not a token file"), ("short", "not a token file")):
        result = run_script(script, *words, "--data", tmp_path / name)
        assert result.returncode == 2, result
        line = result.stderr.splitlines()[-1]
        assert f"--data {tmp_path / name}: {part}" in line and "expected" in line, result


@pytest.mark.parametrize("limit, strict, status", [(60, True, 0), (0, True, 1), (0, False, 0)])
def test_a_missed_target_counts_where_strict_is_given(
    limit: float, strict: bool, status: int, tokens: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(REPO_ROOT)
    monkeypatch.setattr(bench, "START_LIMIT_S", limit)
    trainer = tmp_path / "trainer"
    trainer.write_text("#!/bin/sh\necho 'step 1/1'\n")
    trainer.chmod(0o755)
    words = ["--cpu", "--parts", "start", "--trainer", trainer, "--data", tokens]
    words += ["--out", tmp_path / "out", *(["--strict"] if strict else [])]
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words)])
    if status:
        with pytest.raises(SystemExit) as ended:
            bench.main()
        assert ended.value.code == status
    else:
        bench.main()
    assert ("NOT MET" in capsys.readouterr().out) == (limit == 0)
    assert record_in(tmp_path / "out")["table"][0]["met"] == (limit > 0)


def test_medians_beside_pytorch_were_over_fewer_steps_than_asked_for(
    fp32: Trainer, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(args: object, work: str, *rest: object) -> dict:
        asked.append(rest[-2])
        return {"tokens_per_second": 1.0, "median_ms": 1.0, "min_ms": 1.0, "max_ms": 1.0,
                "memory_gib": 1.0, "losses": []}

    monkeypatch.setattr(compare_torch, "find_torch", lambda: "python3")
    monkeypatch.setattr(compare_torch, "run_torch", run)
    monkeypatch.setattr(compare_torch, "run_trainer", run)
    args = compare_torch.parse_arguments([
        "--cpu", "--trainer", str(fp32.binary), "--data", str(tokens), "--works", "d12-b4",
        "--steps", "20", "--warmup", "5"])
    compare_torch.compare_speed(args, "NVIDIA H200")
    assert asked == [25, 25, 25]


def test_the_ratio_is_to_the_faster_pytorch(
    fp32: Trainer, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run_torch(args: object, work: str, steps: int, more: list[str]) -> dict:
        speed = 20.0 if more else 10.0
        return {"tokens_per_second": speed, "median_ms": 1.0, "min_ms": 1.0, "max_ms": 1.0,
                "memory_gib": 1.0, "losses": []}

    monkeypatch.setattr(compare_torch, "find_torch", lambda: "python3")
    monkeypatch.setattr(compare_torch, "run_torch", run_torch)
    words = ["--cpu", "--trainer", str(fp32.binary), "--data", str(tokens), "--works", "d12-b4"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *words, "--steps", "2", "--warmup", "1"])
    args, table = bench.parse_arguments(), bench.Table()
    args.gpu = "NVIDIA H200"
    bench.measure_torch(args, table)
    assert table.rows[0]["peer"] == 20.0 and table.rows[0]["met"]
    table.print()
    out = capsys.readouterr().out
    assert "torch cuda graphs" in out and "does not count" in out


def test_an_earlier_file_is_never_overwritten(tmp_path: Path) -> None:
    record = {"date": "2026-11-30T000000Z"}
    paths = [compare_torch.save(tmp_path, "bench", {**record, "n": n}) for n in range(3)]
    assert len(set(paths)) == 3
    assert [json.loads(path.read_text())["n"] for path in paths] == [0, 1, 2]


# ----------------------------------------------------------------------------------- make bench_cpu


def test_bench_cpu_on_a_tiny_model(
    fp32: Trainer, bf16: Trainer, tokens: Path, tmp_path: Path
) -> None:
    result = run_script(
        "bench_cpu.py", "--tiny", "--build-dir", fp32.binary.parents[1], "--data", tokens,
        "--steps", 2, "--warmup", 1, "--rounds", 1, "--out", tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = record_in(tmp_path)["figures"]
    assert list(figures["tok/s"]) == [
        f"tiny, {precision}, {ranks}" for precision in ("fp32", "bf16")
        for ranks in ("1 rank", "2 ranks")]
    assert all(speed > 0 for speed in figures["tok/s"].values())


@pytest.mark.parametrize(
    "change, cpu, status",
    [(1.0, None, 0), (0.92, None, 0), (0.88, None, 1), (1.5, None, 0), (1.0, "another", "error")],
)
def test_bench_cpu_compares_with_an_earlier_run_of_this_machine(
    change: float, cpu: str | None, status: object, fp32: Trainer, tokens: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:
    """Speeds go by `change`, where milliseconds go the other way."""
    now = {"tok/s": {name: value * change for name, value in FIGURES["tok/s"].items()},
           "ms": {name: value / change for name, value in FIGURES["ms"].items()}}
    monkeypatch.setattr(bench_cpu, "measure", lambda args: FIGURES)
    words = ["bench_cpu.py", "--data", str(tokens), "--out", str(tmp_path)]
    words += ["--build-dir", str(fp32.binary.parents[1])]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        bench_cpu.main()
    (earlier,) = tmp_path.glob("cpu-*.json")
    if cpu:
        earlier.write_text(json.dumps({**json.loads(earlier.read_text()), "cpu": cpu}))
    monkeypatch.setattr(bench_cpu, "measure", lambda args: now)
    monkeypatch.setattr(sys, "argv", [*words, "--strict", "--compare", str(earlier)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        bench_cpu.main()
    if cpu:
        assert "measured on another" in str(ended.value)
        return
    assert ended.value.code == status
    assert capsys.readouterr().out.count("SLOWER") == (2 if status else 0)
    assert len(list(tmp_path.glob("cpu-*.json"))) == 2


def test_bench_cpu_takes_no_other_files(fp32: Trainer, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    result = run_script("bench_cpu.py", "--compare", tmp_path / "x.json", "--out", tmp_path,
                        "--build-dir", fp32.binary.parents[1])
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "not a file of this script" in result.stderr


@pytest.mark.parametrize("path, part", [
    ("none.json", "no such file"), (".", "no such file"), ("x.json", "not a file of this script")])
def test_compare_printed_an_exception(path: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    for precision in bench_cpu.PRECISIONS:
        trainer = tmp_path / f"cpu-{precision}" / "train_gpt2cpu"
        trainer.parent.mkdir()
        trainer.touch()
        trainer.chmod(0o755)
    result = run_script("bench_cpu.py", "--compare", tmp_path / path, "--build-dir", tmp_path,
                        "--out", tmp_path)
    assert result.returncode == (1 if path == "x.json" else 2), result
    line = result.stderr.splitlines()[-1]
    assert f"--compare {tmp_path / path}: {part}" in line and "expected" in line, result
    assert "Error(" not in result.stderr


# ------------------------------------------------------------------------- test/test_many_gpus.py


def many_gpus(fp32: Trainer, *words: object) -> list[str]:
    script = REPO_ROOT / "test" / "test_many_gpus.py"
    return [sys.executable, str(script), "--backend", "cpu", "--build-dir",
            str(fp32.binary.parents[1]), *map(str, words)]


def test_ranks_that_share_a_processor_have_the_bits_of_one(
    fp32: Trainer, bf16: Trainer, tmp_path: Path
) -> None:
    done = subprocess.run(
        many_gpus(fp32, "--shared", "--only", "nodes.", "--json", tmp_path / "bits.json"),
        capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "6 passed, 0 failed, 0 skipped" in done.stdout, done
    record = record_in(tmp_path)
    runs = [run for run in record["trainings"] if run["build"] == "bf16-own"]
    assert record["shared"] and [run["gpus"] for run in runs] == [1, 4, 4, 8, 8, 8, 8]
    assert len({run["hash"] for run in runs}) == 1


def test_many_gpus_ended_early_left_its_ranks_and_no_results(
    fp32: Trainer, bf16: Trainer, tmp_path: Path
) -> None:
    command = many_gpus(fp32, "--only", "fp32/N", "--json", tmp_path / "bits.json")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert script.stdout is not None
    assert script.stdout.readline().startswith("ok ")
    while not list(tmp_path.glob("ranks_*/1.out")):  # in the middle of another one
        assert script.poll() is None
    script.terminate()
    assert script.wait(30) == 128 + signal.SIGTERM
    for _ in range(100):  # a rank that was just being started ends with the script
        running = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
        if running.stdout == "":
            break
        time.sleep(0.05)
    assert running.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["bits.json"]
    results = [case["result"] for case in record_in(tmp_path)["cases"]]
    assert set(results) == {"ok"} and len(results) < 12, results


# -------------------------------------------------------------------------------- dev/gpu_check.sh


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """A copy of dev/, and in stubs/ tools that do nothing."""
    shutil.copytree(REPO_ROOT / "dev", tmp_path / "dev",
                    ignore=shutil.ignore_patterns("results", "__pycache__", "*.bin"))
    (tmp_path / "stubs").mkdir()
    for tool in ("make", "python3"):
        (tmp_path / "stubs" / tool).write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "stubs" / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    for tool in (tmp_path / "stubs").iterdir():
        tool.chmod(0o755)
    return tmp_path


def run_check(tree: Path, script: str, **env: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("CARRY", "COMMIT", "LOGS", "OUT", "STRICT")}
    environment["PATH"] = f"{tree / 'stubs'}:{os.environ['PATH']}"
    return subprocess.run([str(tree / script)], capture_output=True, text=True, cwd=tree,
                          env={**environment, **env}, timeout=60)


@pytest.mark.parametrize("script, name, value, part", [
    ("dev/gpu_check.sh", "LOGS", "dev/check.py", "must be a folder to write to"),
    ("dev/gpu_check.sh", "LOGS", "dev/check.py/x/y", "must be a folder to write to"),
    ("dev/bench/four_gpus.sh", "LOGS", "dev/check.py", "must be a folder to write to"),
    ("dev/bench/four_gpus.sh", "OUT", "dev/check.py/x", "must be a folder to write to"),
    ("dev/gpu_check.sh", "CARRY", "dev", "must be a folder that dev/gpu_carry.sh has made"),
])
def test_a_folder_of_the_gpu_checks_was_found_out_late(
    script: str, name: str, value: str, part: str, checked: Path
) -> None:
    before = snapshot(checked)
    done = run_check(checked, script, **{name: value})
    assert done.returncode == 1 and done.stderr.startswith(f"error: {name}={value}: {part}"), done
    assert done.stderr.count("\n") == 1 and snapshot(checked) == before


def test_a_carried_folder_with_or_without_the_mark_is_taken(checked: Path) -> None:
    for names in (["include", "lib"], ["made_by_gpu_carry", "notes"]):
        for name in names:
            (checked / "carry").mkdir(exist_ok=True)
            (checked / "carry" / name).touch()
        done = run_check(checked, "dev/gpu_check.sh", CARRY="carry", LOGS="new/logs")
        assert "CARRY" not in done.stderr and (checked / "new" / "logs").is_dir(), done
        shutil.rmtree(checked / "new")
