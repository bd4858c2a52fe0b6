"""The same bits on 1, 2, 4 and 8 ranks, with ZeRO-0 and ZeRO-1, however the ranks were started.

A run of several ranks is compared with one process: each step's line, bits of loss and norm, and
hash of the weights (which --check-ranks compares over all ranks); and after ten steps the hashes of
m, v and master weights.
"""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers import (
    SHAPE,
    STEP_LINE,
    Shape,
    Trainer,
    checkpoints,
    make_tokens,
    model_path,
    random_weights,
    state_path,
    write_eval,
    write_model,
    write_tokens,
)
from many_ranks import (
    SIZES,
    WAYS,
    Lab,
    assert_all_refused,
    assert_same_bits,
    bits_of,
    checked_steps,
    run_ranks,
    switches_binary,
    without,
)

MICRO = (6, 8, 12, 24, 32)  # M, micro-batches in a step
FEW = {"-x": 4}  # steps, where ten show no more


def width(micro: int, limit: int = 8) -> int:
    """W: the largest power of two up to -rw that divides M."""
    return max(w for w in (1, 2, 4, 8, 16) if w <= limit and micro % w == 0)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def trainers(fp32: Trainer, bf16: Trainer) -> dict[str, Trainer]:
    return {"fp32": fp32, "bf16": bf16}


@pytest.fixture(scope="module")
def switches(pytestconfig: pytest.Config) -> Trainer:
    return switches_binary(pytestconfig)


# ------------------------------------------------------------------------------- the whole product


@dataclass(frozen=True)
class Case:
    count: int  # N
    zero: int
    way: str
    precision: str
    micro: int  # M

    def __str__(self) -> str:
        return f"N{self.count}-z{self.zero}-{self.way}-{self.precision}-M{self.micro}"

    @property
    def pairs(self) -> set:
        return set(itertools.combinations(enumerate(astuple(self)), 2))


PRODUCT = [
    Case(*values)
    for values in itertools.product(SIZES, (0, 1), WAYS, ("fp32", "bf16"), MICRO)
    if width(values[-1]) % values[0] == 0
]


def pairwise(cases: list[Case]) -> list[Case]:
    """Some of the cases, in which every pair of values occurs that occurs in any: again and again
    the one that has most pairs that were not there yet."""
    missing = set().union(*(case.pairs for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(case.pairs & missing))
        chosen.append(best)
        missing -= best.pairs
    return chosen


SELECTION = pairwise(PRODUCT)


def test_the_selection_has_every_pair_of_ranks_zero_stage_and_precision() -> None:
    found = {(case.count, case.zero, case.precision) for case in SELECTION}
    for count, zero, precision in itertools.product(SIZES, (0, 1), ("fp32", "bf16")):
        assert (count, zero) in {key[:2] for key in found}
        assert (count, precision) in {(key[0], key[2]) for key in found}
        assert (zero, precision) in {key[1:] for key in found}
    assert {case.way for case in SELECTION} == set(WAYS)
    assert {case.micro for case in SELECTION} == set(MICRO)


def check_case(lab: Lab, trainers: dict[str, Trainer], case: Case) -> None:
    args = lab.args(case.micro, {"-z": case.zero})
    run = lab.equal(trainers[case.precision], case.count, case.way, args)
    assert [step.step for step in checked_steps(run.first)] == list(range(11)), f"{run}"
    assert f"{case.count}, ZeRO stage {case.zero}" in run.first.stdout, f"{run}"
    assert "bit equality" not in run.stdout, f"{run}"


@pytest.mark.parametrize("case", SELECTION, ids=str)
def test_same_bits(lab: Lab, trainers: dict[str, Trainer], case: Case) -> None:
    check_case(lab, trainers, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in PRODUCT if case not in SELECTION], ids=str)
def test_same_bits_whole_product(lab: Lab, trainers: dict[str, Trainer], case: Case) -> None:
    check_case(lab, trainers, case)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_deepspeed_757_966_1488_fifty_steps(
    lab: Lab, trainer: Trainer, count: int, zero: int
) -> None:
    lab.equal(trainer, count, "tcp", lab.args(8, {"-z": zero, "-x": 50}))


def test_two_runs_that_differ_are_told_apart(lab: Lab, bf16: Trainer) -> None:
    """The comparison itself."""
    one = lab.one(bf16, lab.args(8))
    run = lab.many(bf16, 2, "tcp", lab.args(8, {"-rs": 7}))
    with pytest.raises(AssertionError, match="different: loss, norm, m, v, master, weights, step"):
        assert_same_bits(one, run.first)


# --------------------------------------------------------------------------------- outside the set

SHAPE_BY_3 = "custom:L2C48H2T32V256"  # 3 and 6 divide every tensor


@pytest.mark.parametrize(
    "count, zero, way, precision, micro, limit",
    [
        (3, 1, "mpi", "bf16", 6, 8),
        (3, 0, "tcp", "fp32", 24, 8),
        (6, 0, "fs", "bf16", 12, 8),
        (6, 1, "tcp", "fp32", 6, 8),
        (2, 1, "fs", "bf16", 8, 1),
        (4, 0, "mpi", "fp32", 8, 1),
        (8, 1, "tcp", "bf16", 8, 4),
    ],
)
def test_outside_the_set_it_trains_and_says_that_equality_is_off(
    lab: Lab, trainers: dict[str, Trainer], count: int, zero: int, way: str, precision: str,
    micro: int, limit: int,
) -> None:
    args = lab.args(micro, {"-z": zero, "-e": SHAPE_BY_3, "-rw": limit})
    run = lab.many(trainers[precision], count, way, args)
    said = "bit equality across GPU counts is off"
    off = [line for line in run.stdout.splitlines() if said in line]
    why = (f"{count} processes do not divide the width {width(micro, limit)}, the largest power of "
           f"two up to -rw {limit} that divides the {micro} micro-batches of a step")
    assert off == [f"{said}: {why}"], f"{run}"
    assert f"{count}, ZeRO stage {zero}" in run.first.stdout, f"{run}"
    one = lab.one(trainers[precision], without(args, "-z"))
    assert "bit equality" not in one.stdout
    assert run.first.losses == pytest.approx(one.losses, abs=1e-3), f"{one}\n{run}"
    norms = [[float(step.norm) for step in result.steps] for result in (run.first, one)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02), f"{one}\n{run}"
    assert [step.step for step in checked_steps(run.first)] == list(range(11)), f"{run}"


@pytest.mark.parametrize("zero", [0, 1])
def test_outside_the_set_zero_stages_agree(lab: Lab, fp32: Trainer, zero: int) -> None:
    """The same ranks twice: the plain path repeats its bits."""
    args = lab.args(6, {"-z": zero, "-e": SHAPE_BY_3})
    a, b = (lab.many(fp32, 3, "tcp", args) for _ in range(2))
    assert_same_bits(a.first, b.first)


def test_ranks_that_do_not_divide_the_micro_batches(lab: Lab, fp32: Trainer) -> None:
    run = run_ranks(fp32, 4, "tcp", lab.args(6), lab.folder)
    assert_all_refused(run, "-d 96", "64 or 128")


def test_nanochat_533_llmc_551_nearest_batch(lab: Lab, fp32: Trainer) -> None:
    changes = {"-e": "custom:L1C8H1T1024V256", "-b": 4, "-t": 1024, "-d": 500000}
    run = run_ranks(fp32, 3, "tcp", lab.args(1, changes), lab.folder)
    assert_all_refused(run, "-d 500000", "491520 or 503808")


# ----------------------------------------------------------------------------------- odd sizes


@pytest.mark.parametrize("channels", [36, 100, 300])
@pytest.mark.parametrize("count, zero, precision", [(2, 1, "bf16"), (4, 0, "fp32")])
def test_sizes_that_four_divides(
    lab: Lab, trainers: dict[str, Trainer], channels: int, count: int, zero: int, precision: str
) -> None:
    """W = 4 divides every tensor: as any other size."""
    model = f"custom:L2C{channels}H2T32V300"
    args = lab.args(12, {"-z": zero, "-e": model, "-x": 5})
    run = lab.equal(trainers[precision], count, "tcp", args)
    assert f"{count}, ZeRO stage {zero}" in run.first.stdout, f"{run}"


@pytest.mark.parametrize("channels, count", [(36, 2), (36, 8), (100, 2), (300, 8)])
def test_sizes_that_eight_does_not_divide(
    lab: Lab, bf16: Trainer, channels: int, count: int
) -> None:
    """W = 8 does not divide the C elements of a bias: trains, and says that equality is off. Eight
    ranks cannot share the optimizer's state either, and say that as well."""
    model = f"custom:L2C{channels}H2T32V300"
    args = lab.args(8, {"-z": 1, "-e": model, "-x": 5})
    run = lab.many(bf16, count, "tcp", args)
    why = f"the width 8 does not divide the {channels} elements of ln1w"
    assert f"bit equality across GPU counts is off: {why}\n" in run.stdout, f"{run}"
    assert (count == 8) == ("Can't equally partition parameters" in run.stdout), f"{run}"
    assert f"{count}, ZeRO stage {1 if count == 2 else 0}" in run.first.stdout, f"{run}"
    one = lab.one(bf16, without(args, "-z"))
    assert run.first.losses == pytest.approx(one.losses, abs=1e-3), f"{one}\n{run}"


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_stages_that_are_not_built(lab: Lab, bf16: Trainer, zero: int) -> None:
    run = lab.equal(bf16, 2, "fs", lab.args(8, {"-z": zero}))
    assert f"ZeRO stage {zero} is not supported: using stage 0" in run.first.stdout, f"{run}"
    assert f"| -z zero_stage               | 0 ({zero} asked) " in run.first.stdout, "the table"


# -------------------------------------------------------------------------------- hard numbers


def model_file(lab: Lab, name: str, weights: dict[str, np.ndarray], shape: Shape = SHAPE) -> Path:
    return write_model(lab.folder / f"{name}.bin", shape, weights)


@pytest.mark.parametrize("count, zero, precision", [(8, 0, "fp32"), (8, 1, "bf16"), (4, 1, "fp32")])
def test_probabilities_down_to_1e_35(
    lab: Lab, trainers: dict[str, Trainer], count: int, zero: int, precision: str
) -> None:
    """Times 1/d they fall below the smallest normal fp32: a scale that depended on N would show."""
    weights = random_weights(SHAPE)
    weights["lnfw"] *= 120  # logits then have a standard deviation of 13
    model = model_file(lab, "wide", weights)
    run = lab.equal(trainers[precision], count, "tcp", lab.args(8, {"-z": zero, "-e": model}))
    assert 25 < run.first.losses[0] < 60, f"not as wide as meant\n{run}"


@pytest.mark.parametrize("count, zero, way, precision, micro",
                         [(2, 0, "mpi", "fp32", 12), (8, 1, "fs", "bf16", 8),
                          (4, 1, "tcp", "fp32", 32)])
def test_nothing_is_read_before_it_is_written(
    lab: Lab, trainers: dict[str, Trainer], count: int, zero: int, way: str, precision: str,
    micro: int,
) -> None:
    """LLMC_POISON fills all memory with NaN at the start, also what others send into."""
    args = lab.args(micro, {"-z": zero, **FEW})
    lab.equal(trainers[precision], count, way, args, env={"LLMC_POISON": "1"})


@pytest.mark.parametrize("count, zero, micro", [(1, 0, 24), (2, 1, 8), (8, 0, 8), (4, 1, 24)])
def test_junk_between_steps(
    lab: Lab, bf16: Trainer, switches: Trainer, count: int, zero: int, micro: int
) -> None:
    """LLMC_JUNK fills what a step must not read of the one before. The build with switches gives
    the plain build's bits."""
    args = lab.args(micro, {"-z": zero, **FEW})
    run = lab.many(switches, count, "tcp", args, env={"LLMC_JUNK": "1"})
    assert_same_bits(lab.one(bf16, without(args, "-z")), run.first)


def poisoned_token(lab: Lab, what: str) -> dict[str, object]:
    """Flags of a run in which one micro-batch of one step gives what is not finite, and all the
    others are healthy: token 255 occurs once in the data."""
    tokens = make_tokens(2001, 255, 1)
    tokens[1000] = 255
    data = write_tokens(lab.folder / "rare.bin", tokens)
    weights = random_weights(SHAPE)
    weights["wte"][255] = 0
    if what == "loss":  # its logit is -2 * 3e38: infinite loss, finite gradients
        weights["wte"][255, 0] = 3e38
        weights["lnfw"][0], weights["lnfb"][0] = 0, -2
    else:  # 3e38 is added to its 3.3e38 in the residual stream: NaN everywhere
        weights["wte"][255, 0] = 3.3e38
        weights["attprojb"][0, 0] = 3e38
    return {"-e": model_file(lab, f"rare_{what}", weights), "-i": data}


@pytest.mark.parametrize("what, count, zero, way, precision", [
    ("loss", 2, 1, "tcp", "fp32"), ("loss", 4, 0, "mpi", "bf16"), ("gradient", 4, 1, "tcp", "fp32"),
    ("gradient", 8, 1, "fs", "bf16"),
])
def test_llmc_637_not_finite_on_one_rank_skips_on_all(
    lab: Lab, trainers: dict[str, Trainer], what: str, count: int, zero: int, way: str,
    precision: str,
) -> None:
    args = lab.args(8, {"-z": zero, **poisoned_token(lab, what)})
    run = lab.equal(trainers[precision], count, way, args)
    assert run.first.skipped == [2], f"{run}"
    hashes = {step.step: step.weights for step in checked_steps(run.first)}
    assert hashes[1] == hashes[2] != hashes[3], f"a skipped step changed weights\n{run}"


# ------------------------------------------------------------------- what must not change the bits


@pytest.mark.parametrize("count, zero", [(4, 0), (4, 1), (2, 1)])
def test_llmc_597_without_master_weights(
    lab: Lab, bf16: Trainer, count: int, zero: int
) -> None:
    lab.equal(bf16, count, "tcp", lab.args(8, {"-z": zero, "-w": 0}))


@pytest.mark.parametrize("changes", [
    {"-r": 0}, {"-r": 2}, {"-rw": 16, "-d": 256}, {"-rw": 4}, {"-a": 1}, {"-b": 2, "-d": 256},
    {"-k": "cosine", "-q": 0.1, "-u": 3},
], ids=lambda changes: " ".join(f"{k} {v}" for k, v in changes.items()))
def test_options(lab: Lab, bf16: Trainer, changes: dict[str, object]) -> None:
    lab.equal(bf16, 4, "tcp", lab.args(8, {"-z": 1, **FEW, **changes}))


def hellaswag(lab: Lab, count: int) -> Path:
    """A folder to run in, with so many examples."""
    place = lab.folder / f"swag_{count}"
    swag = place / "dev/data/hellaswag/hellaswag_val.bin"
    swag.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(count)
    examples = []
    for _ in range(count):
        text = list(rng.integers(0, SHAPE.vocab_size, 6))
        completions = [list(rng.integers(0, SHAPE.vocab_size, 3 + k)) for k in range(4)]
        examples.append((int(rng.integers(4)), text, completions))
    write_eval(swag, examples)
    return place


def watched(text: str) -> list[str]:
    """What validation, HellaSwag and sampling print."""
    lines = re.findall(r"^(?:val loss|HellaSwag:) .*$", text, re.MULTILINE)
    return lines + re.findall(r"^generating:\n---\n.*?\n---$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("count, zero, way, precision",
                         [(8, 1, "tcp", "bf16"), (2, 0, "mpi", "fp32"), (8, 0, "fs", "fp32")])
def test_llmc_584_watching_changes_nothing_and_sees_the_same(
    lab: Lab, trainers: dict[str, Trainer], count: int, zero: int, way: str, precision: str,
    tmp_path: Path,
) -> None:
    """Seven validation micro-batches and five examples on eight ranks: the losses, the accuracy and
    the samples of one process; and the bits of a run without all this."""
    trainer, place = trainers[precision], hellaswag(lab, 5)
    bare = {"-b": 4, "-d": 512, "-z": zero, "-e": "custom:L2C32H2T32V256"}
    seen = {"-v": 3, "-m": 100, "-h": 1, "-s": 4, "-g": 5, "-n": 4}
    one = lab.one(trainer, without(lab.args(8, {**bare, **seen}), "-z"), cwd=place)
    run = lab.many(trainer, count, way, lab.args(8, {**bare, **seen, "-o": tmp_path / "out"}),
                   cwd=place)
    assert len(watched(one.stdout)) >= 2 * 4 + 2, f"{one}"
    assert watched(run.first.stdout) == watched(one.stdout), f"{one}\n{run}"
    assert_same_bits(one, run.first)
    assert_same_bits(lab.one(trainer, without(lab.args(8, bare), "-z")), run.first)
    assert checkpoints(tmp_path / "out") == [4, 8, 10]


@pytest.mark.parametrize("count, zero, precision", [(8, 1, "fp32"), (4, 0, "bf16"), (2, 1, "bf16")])
def test_llmc_792_files_of_lengths_that_nothing_divides(
    lab: Lab, trainers: dict[str, Trainer], count: int, zero: int, precision: str
) -> None:
    """60 windows in files of 331, 457 and 197 tokens, 16 windows a step: ten steps are 2.7 epochs,
    and files and epochs end inside steps and inside micro-batches."""
    for i, tokens in enumerate((331, 457, 197)):
        write_tokens(lab.folder / f"odd_{i}.bin", make_tokens(tokens, SHAPE.vocab_size, seed=i))
    flags = {"-i": lab.folder / "odd_*.bin", "-b": 2, "-d": 256, "-z": zero}
    lab.equal(trainers[precision], count, "tcp", lab.args(8, flags))


NODE_MAPS = {
    "4x2": "aabbccdd",
    "2x4": "aaaabbbb",
    "6+2": "aaaaaabb",
    "4+2+2": "aaaabbcc",
    "round robin": "abababab",
}


@pytest.mark.parametrize("name, zero", list(zip(NODE_MAPS, (0, 1, 0, 1, 1))))
def test_node_maps(lab: Lab, bf16: Trainer, switches: Trainer, name: str, zero: int) -> None:
    """LLMC_HOST stands for a rank's host name."""
    args = lab.args(8, {"-z": zero, **FEW})
    run = lab.many(switches, 8, "mpi", args,
                   env=lambda rank: {"LLMC_HOST": f"node-{NODE_MAPS[name][rank]}.example.org"})
    assert_same_bits(lab.one(bf16, without(args, "-z")), run.first)


@pytest.mark.parametrize("per_node", [2, 6])
def test_gpus_per_node(lab: Lab, bf16: Trainer, per_node: int) -> None:
    lab.equal(bf16, 8, "tcp", lab.args(8, {"-z": 1, "-pg": per_node, **FEW}))


@pytest.mark.parametrize("binding", ["none", "core:overload-allowed"])
def test_mpirun_binding(lab: Lab, bf16: Trainer, binding: str) -> None:
    lab.equal(bf16, 4, "mpi", lab.args(8, {"-z": 1, **FEW}), mpirun=["--bind-to", binding])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_ranks_on_one_core(lab: Lab, trainers: dict[str, Trainer], precision: str) -> None:
    model = {"-e": "custom:L2C128H2T32V256"}  # large enough for several threads
    args = lab.args(8, {"-z": 1, "-x": 4, **model})
    lab.equal(trainers[precision], 4, "tcp", args, prefix=["taskset", "-c", "0"])


def test_openblas_core_type(lab: Lab, fp32: Trainer) -> None:
    env = {"OPENBLAS_CORETYPE": "HASWELL"}
    one = lab.one(fp32, lab.args(8, FEW), env=env)
    for count, way in ((2, "mpi"), (8, "tcp")):
        args = lab.args(8, {"-z": 1, **FEW})
        assert_same_bits(one, lab.many(fp32, count, way, args, env=env).first)


def test_openblas_core_types_that_differ_are_refused(lab: Lab, fp32: Trainer) -> None:
    def env(rank: int) -> dict[str, str]:
        return {"OPENBLAS_CORETYPE": "PRESCOTT" if rank == 1 else "HASWELL"}

    run = run_ranks(fp32, 2, "tcp", lab.args(8), lab.folder, env=env)
    assert_all_refused(run, "OpenBLAS")


@pytest.mark.parametrize("delays", [("LLMC_DELAY_MAIN_US",), ("LLMC_DELAY_NCCL_US",),
                                    ("LLMC_DELAY_MAIN_US", "LLMC_DELAY_NCCL_US")])
@pytest.mark.parametrize("count, zero", [(2, 0), (4, 1)])
def test_infinitrain_213_delays_on_either_stream(
    lab: Lab, bf16: Trainer, switches: Trainer, delays: tuple[str, ...], count: int, zero: int
) -> None:
    """Only events order the streams: whichever is late, the result is the same."""
    env = {name: "500" for name in delays}
    args = lab.args(8, {"-z": zero, **FEW})
    run = lab.many(switches, count, "tcp", args, env=env)
    assert_same_bits(lab.one(bf16, without(args, "-z")), run.first)


def test_an_update_before_a_validation_counts_in_its_step_s_time(
    lab: Lab, switches: Trainer
) -> None:
    """It ran during the validation, and was in no step's time: steps looked faster with -v 1."""
    env = {"LLMC_DELAY_UPDATE_US": "60000"}  # 30 ms on average, 360 in twelve steps
    args = lab.work.args({"-b": 1, "-t": 16, "-d": 32, "-x": 12, "-v": 1})
    result = switches.train(args, env=env)
    assert "val loss" in result.stdout
    lines = [match for match in map(STEP_LINE.match, result.stdout.splitlines()) if match]
    assert len(lines) == 12
    assert sum(float(match["ms"]) for match in lines) > 100, f"{result}"


# -------------------------------------------------------------------------------------- restart


@dataclass(frozen=True)
class Half:
    """Half a training: ranks, ZeRO stage and way."""

    count: int
    zero: int
    way: str = "tcp"

    def __str__(self) -> str:
        return f"N{self.count}z{self.zero}"


@pytest.fixture(scope="module")
def saved(lab: Lab, trainers: dict[str, Trainer]):
    """Folders with the checkpoint after five of ten steps, each made once."""
    folders: dict[tuple[str, Half], Path] = {}

    def make(precision: str, half: Half) -> Path:
        key = (precision, half)
        if key not in folders:
            folder = lab.folder / f"saved_{precision}_{half}"
            args = lab.args(8, {"-z": half.zero, "-o": folder, "-n": 5, "-x": 10})
            run = lab.equal(trainers[precision], half.count, half.way, args)
            assert checkpoints(folder) == [5, 10]
            assert len(list(folder.glob("state_00000005_*"))) == half.count, f"{run}"
            folders[key] = folder
        return folders[key]

    return make


def check_resume(
    lab: Lab, trainer: Trainer, whole: Path, place: Path, second: Half
) -> None:
    """Goes on from step 5 of a run of ten; the bits and the model file are those of that run."""
    out = place / "out"
    out.mkdir()
    for path in whole.iterdir():
        if "00000005" in path.name:
            shutil.copy(path, out)
    args = lab.args(8, {"-z": second.zero, "-o": out, "-n": 5, "-y": 1})
    run = lab.many(trainer, second.count, second.way, args)
    one = lab.one(trainer, lab.args(8))
    expected, found = bits_of(one), bits_of(run.first)
    expected["step lines"] = one.numbers[5:]
    found["steps"], expected["steps"] = checked_steps(run.first)[1:], checked_steps(one)[6:]
    assert found == expected, f"{one}\n{run}"
    assert checked_steps(run.first)[0].weights == checked_steps(one)[5].weights, f"{one}\n{run}"
    assert model_path(out, 10).read_bytes() == model_path(whole, 10).read_bytes()


@pytest.mark.parametrize("first, second", [
    (Half(1, 0), Half(8, 1, "mpi")),
    (Half(8, 1), Half(1, 0)),
    (Half(2, 1, "fs"), Half(4, 0)),
    (Half(4, 0, "mpi"), Half(2, 1, "fs")),
    (Half(8, 1), Half(2, 0)),
    (Half(2, 1, "fs"), Half(2, 1, "mpi")),
], ids=str)
@pytest.mark.parametrize("precision", ["bf16"])
def test_resume(
    lab: Lab, trainers: dict[str, Trainer], saved, tmp_path: Path, precision: str, first: Half,
    second: Half,
) -> None:
    check_resume(lab, trainers[precision], saved(precision, first), tmp_path, second)


HALVES = [Half(count, zero) for count in SIZES for zero in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("second", HALVES, ids=str)
@pytest.mark.parametrize("first", HALVES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_any_to_any(
    lab: Lab, trainers: dict[str, Trainer], saved, tmp_path: Path, precision: str, first: Half,
    second: Half,
) -> None:
    check_resume(lab, trainers[precision], saved(precision, first), tmp_path, second)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_megatron_552_659_saved_by_2_ranks_resumed_by_others(
    lab: Lab, bf16: Trainer, tmp_path: Path, count: int
) -> None:
    """Three ranks are outside the set: right to rounding, and the difference is announced."""
    flags = {"-z": 1, "-e": SHAPE_BY_3, "-n": 5, "-x": 10}
    out = tmp_path / "out"
    lab.many(bf16, 2, "tcp", lab.args(12, {**flags, "-x": 5, "-o": out}))
    assert checkpoints(out) == [5] and state_path(out, 5, 1).exists()
    run = lab.many(bf16, count, "tcp", lab.args(12, {**flags, "-o": out, "-y": 1}))
    one = lab.one(bf16, without(lab.args(12, {**flags, "-n": 0}), "-z"))
    assert [step.step for step in run.first.steps] == [6, 7, 8, 9, 10]
    assert run.first.losses == pytest.approx(one.losses[5:], abs=1e-3), f"{one}\n{run}"
    equal = (run.first.hash, run.first.bits) == (one.hash, one.bits)
    assert equal == (count != 3), f"{one}\n{run}"
    assert ("bit equality across GPU counts is off" in run.stdout) == (count == 3), f"{run}"
