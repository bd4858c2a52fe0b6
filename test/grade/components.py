"""The components that ./grade A4 gives points for: what each must do, and where to look if not.

A judge returns what is wrong, as problems, and notes for a line that passes. A component is judged
by runs that need as little of the others as possible: whatever starts processes is the first of
mpi, tcp and fs that works.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Sequence

from lab import STEPS, Checks, Lab, Seen, Training

MAIN = ("start", "sum", "barrier", "zero0", "zero1", "gather", "free")
STARTS = ("ids", "start", "free")
PARAMETERS = 50720  # of the model in checks.cu
MAX_START = 0.01  # of a run of 1000 steps, for tcp on GPUs
MAX_STEP = 1.05  # likewise, a step's time against mpi's
REPEATS = 3  # of a comparison of times before it counts


@dataclass(frozen=True)
class Problem:
    text: str
    looks: tuple[str, ...]  # file and function, and the likely mistake


@dataclass
class Verdict:
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""  # why it was not judged

    def problem(self, text: str, *looks: str) -> None:
        if not any(text == problem.text for problem in self.problems):
            self.problems.append(Problem(text, looks))


# --------------------------------------------------------------------------------- starting

START_LOOK = {
    "mpi": "llmc/zero_start.cuh, start_by_mpi: rank and size are MPI's, rank 0 makes the id and "
    "all others get it by MPI_Bcast",
    "tcp": "llmc/zero_start.cuh, get_nccl_id_via_tcp and send_nccl_id_to_clients: every client "
    "gets all bytes of rank 0's id",
    "fs": "llmc/zero_start.cuh, get_nccl_id_via_fs, and llmc/shared_id_file.h: a file is taken "
    "only when it is whole and its rank 0 answers",
}
INIT_LOOK = (
    "llmc/zero.cuh, multi_gpu_config_init, and llmc/zero_start.cuh, open_communicator: "
    "cudaSetDevice, then ncclCommInitRank with rank and size, then stream, event and buffer"
)


def start_checks(lab: Lab, way: str) -> Checks:
    if way == "mpi":
        return lab.checks(way, lab.sizes[-1], MAIN)
    return lab.checks(way, 2, STARTS)


def judge_config(lab: Lab, checks: Checks, verdict: Verdict) -> None:
    """What multi_gpu_config_init must have made of each rank."""
    look = START_LOOK[checks.way]
    n = checks.count
    for rank, seen in checks.rows("start", "config"):
        who = f"rank {rank} of {n}"
        if (seen["rank"], seen["size"]) != (str(rank), str(n)):
            verdict.problem(f"{who} takes itself for rank {seen['rank']} of {seen['size']}", look)
        if seen["communicator_rank"] != seen["rank"] or seen["communicator_size"] != str(n):
            verdict.problem(f"{who} is rank {seen['communicator_rank']} of "
                            f"{seen['communicator_size']} in the communicator", INIT_LOOK)
        device = str(rank) if lab.backend == "gpu" else "0"
        if (seen["device"], seen["current"]) != (device, device):
            verdict.problem(f"{who} has local_device_idx {seen['device']} and uses device "
                            f"{seen['current']}, not {device}", INIT_LOOK)
        for name in ("stream", "event", "buffer"):
            if seen[name] != "1":
                verdict.problem(f"{who} has no {name} after the start", INIT_LOOK)
    expected = ",".join(map(str, range(n)))
    for rank, seen in checks.rows("start", "gather"):
        if seen["ranks"] != expected:
            verdict.problem(f"an all-gather of the ranks brought {seen['ranks']} to rank {rank}",
                            INIT_LOOK)


def judge_start(lab: Lab, way: str) -> Verdict:
    verdict = Verdict()
    if way == "mpi" and not lab.has_mpi:
        return Verdict(skipped="built without MPI, or no mpirun")
    checks = start_checks(lab, way)
    look = START_LOOK[way]
    ids = checks.rows("ids", "id")
    if len({seen["hash"] for _, seen in ids}) > 1:
        verdict.problem("ranks have different NCCL ids", look)
    if any(seen["empty"] != "0" for _, seen in ids):
        verdict.problem("the NCCL id is empty", look)
    for name in ("ids", "start"):
        if name in checks.error:
            verdict.problem(checks.error[name], look)
    judge_config(lab, checks, verdict)
    if way == "fs" and checks.left_behind:
        verdict.problem("the id's file is still there after the start", look)
    lab.start_works[way] = not verdict.problems
    seconds = max((float(s["seconds"]) for _, s in checks.rows("start", "config")), default=0.0)
    verdict.notes.append(f"{checks.count} ranks, {seconds:.2f} s from start to communicator")
    return verdict


def main_checks(lab: Lab) -> Checks | None:
    """The checks of single functions on as many ranks as there may be; None when none can start."""
    if not lab.ways:
        return None
    return lab.checks(lab.ways[0], lab.sizes[-1], MAIN)


def missing(checks: Checks | None, name: str, verdict: Verdict, look: str) -> bool:
    """Whether a check has no result, which is a problem then."""
    if checks is None:
        verdict.problem("not reached: no way to start the ranks works", look)
    elif name in checks.error:
        verdict.problem(checks.error[name], look)
    elif name not in checks.seen:
        why = next(iter(checks.error.values()), "no result")
        verdict.problem(f"not reached: {why}", look)
    else:
        return False
    return True


# ------------------------------------------------------------------------- device, free, sum

LOCAL_LOOK = (
    "llmc/zero_start.cuh, multi_gpu_get_local_device_idx: the number of lower ranks whose host "
    "name, cut at the first dot, has the same hash"
)


def right_index(names: str, rank: int) -> int:
    hosts = [name.split(".")[0] for name in names.split(",")]
    return hosts[:rank].count(hosts[rank])


def judge_local(lab: Lab) -> Verdict:
    if not lab.has_mpi:
        return Verdict(skipped="built without MPI, or no mpirun")
    verdict, checks = Verdict(), lab.local()
    if missing(checks, "local", verdict, LOCAL_LOOK):
        return verdict
    for rank, seen in checks.rows("local", "own"):
        if seen["index"] != str(rank):
            verdict.problem(f"four ranks on this host: rank {rank} has index {seen['index']}",
                            LOCAL_LOOK)
    maps = checks.rows("local", "hosts")
    for rank, seen in maps:
        if seen["index"] != str(right_index(seen["names"], rank)):
            verdict.problem(
                f"on hosts {seen['names']} rank {rank} has index {seen['index']}, not "
                f"{right_index(seen['names'], rank)}", LOCAL_LOOK)
    verdict.notes.append(f"{len({seen['names'] for _, seen in maps})} sets of hosts")
    return verdict


FREE_LOOK = (
    "llmc/zero.cuh, multi_gpu_config_free, and llmc/zero_start.cuh, close_communicator: destroy "
    "communicator, stream, event and buffer, end MPI, leave nothing that a second start would meet"
)
BARRIER_LOOK = (
    "llmc/zero.cuh, multi_gpu_barrier: an all-reduce of one float that the host waits for"
)
SUM_LOOK = (
    "llmc/zero.cuh, multi_gpu_cpu_float_sum: one float in unified_buffer, ncclSum, wait, read "
    "back; with one process the value itself"
)


def judge_free(lab: Lab) -> Verdict:
    verdict = Verdict()
    checks = main_checks(lab)
    if not missing(checks, "sum", verdict, SUM_LOOK):
        judge_sum(checks, verdict)
    if not missing(checks, "barrier", verdict, BARRIER_LOOK):
        judge_barrier(checks, verdict)
    if missing(checks, "free", verdict, FREE_LOOK):
        return verdict
    for each in [checks, *(start_checks(lab, way) for way in lab.ways if way != checks.way)]:
        if not missing(each, "free", verdict, FREE_LOOK):
            judge_end(each, verdict)
    return verdict


def judge_sum(checks: Checks, verdict: Verdict) -> None:
    ranks = range(checks.count)
    right = [sum(r + 0.25 for r in ranks), sum(-1.5 * r for r in ranks), 1048576.0 * checks.count]
    for rank, seen in checks.rows("sum", "all"):
        expected = right[int(seen["call"])]
        if float(seen["sum"]) != expected:
            verdict.problem(f"rank {rank} has the sum {seen['sum']}, not {expected:g}", SUM_LOOK)
    for rank, seen in checks.rows("sum", "alone"):
        if float(seen["sum"]) != 2.75:
            verdict.problem(f"one process has the sum {seen['sum']} of 2.75", SUM_LOOK)


def judge_barrier(checks: Checks, verdict: Verdict) -> None:
    """Nobody leaves before the last one has come."""
    rows = checks.rows("barrier", "round")
    for late in range(checks.count):
        rounds = [seen for _, seen in rows if seen["late"] == str(late)]
        early = max(int(s["enter"]) for s in rounds) - min(int(s["leave"]) for s in rounds)
        if early > 0:
            verdict.problem(f"a rank left the barrier {early / 1e6:.3g} ms before rank {late} came",
                            BARRIER_LOOK)


def judge_end(checks: Checks, verdict: Verdict) -> None:
    n, way = checks.count, checks.way
    for rank, seen in checks.rows("free", "reset"):
        if seen["reset"] != "1":
            verdict.problem(f"{way}: rank {rank} still has a communicator", FREE_LOOK)
    for rank, seen in checks.rows("free", "mpi"):
        if seen["finalized"] != "1":
            verdict.problem(f"rank {rank} has not ended MPI", FREE_LOOK)
    again = checks.rows("free", "again")
    if way != "mpi" and len(again) != n and not verdict.problems:
        verdict.problem(f"{way}: no second start after the end", FREE_LOOK)
    for rank, seen in again:
        if seen["ranks"] != ",".join(map(str, range(n))):
            verdict.problem(f"{way}: a second start brought {seen['ranks']} to rank {rank}",
                            FREE_LOOK)
    if "end" in checks.error:
        verdict.problem(f"{way}: {checks.error['end']}", FREE_LOOK)


# ------------------------------------------------------------------------------------ shards

SHARD_LOOK = (
    "llmc/zero.cuh, multi_gpu_get_shard_offset: {rank * elements / N, elements / N} when "
    "zero_stage >= shard_at_stage, else {0, elements}; an error when N does not divide"
)
ZERO_LOOK = (
    "llmc/zero.cuh, set_zero_configs: stage 1 only when N divides the parameters and every tensor, "
    "shard_num_parameters is then total / N; stages 2 and 3 become 0"
)


def right_stage(n: int, positions: int, asked: int) -> tuple[int, str]:
    """The stage, and what the message must say."""
    if asked > 1:
        return 0, f"stage {asked}"
    if asked == 1 and n == 3:  # of the tensors and, with 24 positions, of the sum, too
        return 0, "Can't equally partition parameters"
    return asked, ""


def judge_shards(lab: Lab) -> Verdict:
    verdict, checks = Verdict(), lab.shards()
    if missing(checks, "shards", verdict, SHARD_LOOK):
        return verdict
    for _, seen in checks.rows("shards", "offset"):
        n, rank, stage, elements = (int(seen[k]) for k in ("n", "rank", "stage", "elements"))
        right = (rank * elements // n, elements // n) if stage == 1 else (0, elements)
        found = (int(seen["offset"]), int(seen["size"]))
        if found != right:
            verdict.problem(f"stage {stage}, rank {rank} of {n}: offset and size of {elements} "
                            f"elements are {found}, not {right}", SHARD_LOOK)
    if any(seen["refused"] != "1" for _, seen in checks.rows("shards", "uneven")):
        verdict.problem("42 elements on 4 ranks are no error", SHARD_LOOK)
    for _, seen in checks.rows("shards", "zero"):
        n, positions, asked, total = (int(seen[k]) for k in ("n", "positions", "asked", "total"))
        stage, message = right_stage(n, positions, asked)
        shard = total // n if stage == 1 else total
        what = f"-z {asked} on {n} ranks, {total} parameters"
        if (int(seen["stage"]), int(seen["shard"])) != (stage, shard):
            verdict.problem(f"{what}: stage {seen['stage']} with {seen['shard']} parameters a "
                            f"rank, not stage {stage} with {shard}", ZERO_LOOK)
        if message not in seen["message"] or bool(message) != bool(seen["message"]):
            verdict.problem(f"{what}: the message is '{seen['message']}', expected '{message}'",
                            ZERO_LOOK)
    return verdict


# --------------------------------------------------------------------------------- reduction

REDUCE_LOOK = {
    0: "llmc/zero.cuh, multi_gpu_async_reduce_gradient, and llmc/zero_exchange.cuh: every rank "
    "ends with the whole sum (advance_lists, gather_list); ncclAllReduce with ncclAvg on the plain "
    "path, and no second division by N",
    1: "llmc/zero.cuh, multi_gpu_async_reduce_gradient, and llmc/zero_exchange.cuh, "
    "exchange_stages: rank r ends with shard r of every tensor of every layer; on the plain path "
    "ncclReduceScatter into pointer + shard_size * rank",
}
EVENT_LOOK = (
    "llmc/zero.cuh, multi_gpu_async_reduce_gradient: cudaEventRecord on the compute stream and "
    "cudaStreamWaitEvent on the NCCL stream, before the collectives; the host itself never waits"
)
PART_NAMES = {
    "tree": "the tree",
    "two_levels": "the tree over two nodes",
    "mean": "the plain path's mean",
}


def judge_reduction(lab: Lab, stage: int) -> Verdict:
    verdict, checks, check = Verdict(), main_checks(lab), f"zero{stage}"
    look = REDUCE_LOOK[stage]
    if missing(checks, check, verdict, look):
        return verdict
    n = checks.count
    parts = [part for part in PART_NAMES if part != "two_levels" or n >= 4]
    compared = PARAMETERS if stage == 0 else PARAMETERS // n
    for part in parts:
        rows = checks.rows(check, part)
        if len(rows) != n or any(seen["compared"] != str(compared) for _, seen in rows):
            verdict.problem(f"{PART_NAMES[part]}: not all elements were compared", look)
        for rank, seen in rows:
            judge_elements(f"{PART_NAMES[part]}: rank {rank}", seen, verdict, look, EVENT_LOOK)
            if seen["host_waited"] != "0":
                verdict.problem(f"{PART_NAMES[part]}: the host waits for the compute stream",
                                EVENT_LOOK)
    verdict.notes.append(f"{n} ranks, {', '.join(PART_NAMES[part] for part in parts)}")
    return verdict


def judge_elements(who: str, seen: Seen, verdict: Verdict, *looks: str) -> None:
    if seen["wrong"] != "0":
        verdict.problem(f"{who} has {seen['wrong']} of {seen['compared']} elements wrong, first "
                        f"{seen['first']}", *looks)
    if seen["spilt"] != "0":
        verdict.problem(f"{who} has {seen['spilt']} elements written between tensors", *looks)


# ----------------------------------------------------------------------------- whole trainings

GATHER_LOOK = (
    "llmc/zero.cuh, multi_gpu_gather_weights, and train_gpt2.cu, update_group: ncclAllGather of "
    "this rank's shard of every tensor (the layer first, then the shard), behind its update on the "
    "main stream, and the next forward behind the gathering"
)
LOSS_LOOK = (
    "train_gpt2.cu, gpt2_backward_and_reduce (a second division by N, accumulation in another "
    "order, a floating-point atomicAdd), gpt2_update (a rounding seed that depends on the rank), "
    "llmc/dataloader.h (which micro-batches are a rank's), or the host reads the loss before the "
    "streams are done"
)


def judge_update(lab: Lab) -> Verdict:
    verdict, checks = Verdict(), main_checks(lab)
    if missing(checks, "gather", verdict, GATHER_LOOK):
        return verdict
    for rank, seen in checks.rows("gather", "weights"):
        judge_elements(f"rank {rank} after the gathering", seen, verdict, GATHER_LOOK)
        if seen["host_waited"] != "0":
            verdict.problem("the host waits for the update before it queues the gathering",
                            GATHER_LOOK)
    one = lab.train(1, 0)
    if one.error:
        verdict.problem(f"{one.name}: {one.error}", GATHER_LOOK)
        return verdict
    for count in lab.sizes:
        many = lab.train(count, 1)
        if many.error:
            verdict.problem(f"{many.name}: {many.error}", GATHER_LOOK)
        elif many.settled_stage != 1:
            verdict.problem(f"{many.name}: ZeRO-1 was not used", ZERO_LOOK)
        elif many.bits != one.bits:
            verdict.problem(f"{many.name}: {first_difference(one, many)}", GATHER_LOOK)
    sizes = " and ".join(map(str, lab.sizes))
    verdict.notes.append(f"weights and optimizer state of {sizes} ranks are those of one")
    return verdict


def first_difference(one: Training, many: Training) -> str:
    pairs = zip(one.bits, many.bits)
    found = next(((a, b) for a, b in pairs if a != b), ("", "lines are missing"))
    what = found[1].split(":")[0] if found[1].startswith("weights") else "state at the end"
    return f"other bits than with 1 rank, first in {what}"


def judge_loss(lab: Lab) -> Verdict:
    verdict = Verdict()
    if not lab.ways:
        verdict.problem("not reached: no way to start the ranks works", LOSS_LOOK)
        return verdict
    one = lab.train(1, 0)
    if one.error:
        verdict.problem(f"{one.name}: {one.error}", LOSS_LOOK)
        return verdict
    for count in lab.sizes:
        for stage in (0, 1):
            compare_losses(one, lab.train(count, stage), verdict)
    sizes = ", ".join(map(str, [1, *lab.sizes]))
    unit = "GPUs" if lab.backend == "gpu" else "ranks"
    verdict.notes.append(f"loss {one.losses[-1]} at step {STEPS} on {sizes} {unit}, same bits")
    if 4 not in lab.sizes:
        verdict.notes.append(f"4 {unit}: not run")
    return verdict


def compare_losses(one: Training, many: Training, verdict: Verdict) -> None:
    if many.error:
        verdict.problem(f"{many.name}: {many.error}", LOSS_LOOK)
    elif many.losses[-1] != one.losses[-1]:
        verdict.problem(f"{many.name}: loss {many.losses[-1]} at step {STEPS}, with 1 rank "
                        f"{one.losses[-1]}", LOSS_LOOK)
    elif not many.in_set:
        verdict.problem(f"{many.name}: bit equality is off", LOSS_LOOK)
    elif many.bits != one.bits:
        verdict.problem(f"{many.name}: {first_difference(one, many)}", LOSS_LOOK)


# ---------------------------------------------------------------------------------- tcp's cost

COST_LOOK = (
    "llmc/peers.h, join_peers and PeerServer: a client that sleeps between its attempts, a server "
    "that sees connections late; after the start nothing may go over these sockets in a step"
)


def judge_tcp(lab: Lab) -> Verdict:
    verdict = judge_start(lab, "tcp")
    if verdict.problems:
        return verdict
    # The last rank to come waits for nobody: what it takes is what the exchange costs.
    own = min(float(seen["seconds"]) for _, seen in lab.checks("tcp", 2, STARTS).rows("ids", "id"))
    step_s = lab.train(2, 0).step_ms / 1000.0
    if step_s == 0.0:
        verdict.notes.append("cost not measured: the training failed")
        return verdict
    share = own / (1000 * step_s)
    verdict.notes.append(f"the exchange takes {own * 1e3:.1f} ms, {share:.2%} of 1000 steps")
    if lab.backend == "gpu":
        if share >= MAX_START:
            verdict.problem(f"the exchange takes {own:.3f} s, {share:.1%} of 1000 steps", COST_LOOK)
        judge_step_time(lab, verdict)
    return verdict


def judge_step_time(lab: Lab, verdict: Verdict) -> None:
    """A step takes as long as when another way has started the ranks; within the noise of a few."""
    others = [way for way in lab.ways if way != "tcp"]
    if not others:
        verdict.notes.append("no other way to compare a step's time with")
        return
    ratios = []
    for again in range(REPEATS):
        tcp, other = (lab.train(2, 0, way, again) for way in ("tcp", others[0]))
        for each in (tcp, other):
            if each.error:
                verdict.problem(f"{each.name} by {each.way}: {each.error}", COST_LOOK)
                return
        if tcp.bits != other.bits:
            verdict.problem(f"tcp: {first_difference(other, tcp)}".replace("1 rank", other.way),
                            START_LOOK["tcp"])
            return
        ratios.append(tcp.step_ms / other.step_ms)
        if ratios[-1] <= MAX_STEP:
            break
    if min(ratios) > MAX_STEP:
        verdict.problem(f"a step takes {min(ratios):.3f} times as long as with {others[0]}",
                        COST_LOOK)
    verdict.notes.append(f"a step takes {min(ratios):.3f} times as long as with {others[0]}")


# -------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Component:
    key: str
    title: str
    points: int
    judge: Callable[[Lab], Verdict]
    bonus: bool = False


COMPONENTS: Sequence[Component] = (
    Component("mpi", "multi_gpu_config_init via MPI", 15, lambda lab: judge_start(lab, "mpi")),
    Component("fs", "get_nccl_id_via_fs and the fs start", 10, lambda lab: judge_start(lab, "fs")),
    Component("local", "multi_gpu_get_local_device_idx", 5, judge_local),
    Component("free", "multi_gpu_config_free, multi_gpu_barrier, multi_gpu_cpu_float_sum", 5,
              judge_free),
    Component("shards", "multi_gpu_get_shard_offset and set_zero_configs", 10, judge_shards),
    Component("zero0", "multi_gpu_async_reduce_gradient, ZeRO-0", 15,
              lambda lab: judge_reduction(lab, 0)),
    Component("zero1", "multi_gpu_async_reduce_gradient, ZeRO-1", 15,
              lambda lab: judge_reduction(lab, 1)),
    Component("update", "gpt2_update with all-gather for ZeRO-1", 15, judge_update),
    Component("loss", "same loss on 1, 2 and 4 GPUs at a fixed total batch size", 10, judge_loss),
    Component("tcp", "get_nccl_id_via_tcp and the tcp start", 10, judge_tcp, bonus=True),
)


def judge_starts(lab: Lab) -> None:
    """Finds out which ways to start work, before anything else needs one."""
    for way in ("mpi", "tcp", "fs"):
        judge_start(lab, way)
