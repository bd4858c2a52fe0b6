"""A real Slurm on this machine: a controller and nodes as processes of the caller, in one folder.

Debian's `slurm-wlm` is built so that several slurmd run on one host (`slurmd -N name`), each
standing for a node. Nothing of the machine's own Slurm or munge is touched: configuration,
key, socket, ports, logs and state are the cluster's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path
from typing import Callable, Mapping

from helpers import REPO_ROOT
from many_ranks import free_port

PROGRAMS = (
    *("slurmctld", "slurmd", "munged"),
    *("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue"),
)
NULL_DEVICE = os.makedev(1, 3)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def why_not() -> str:
    """Why no cluster can be started here; "" when one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"no {', '.join(missing)} here; as root: dev/setup.sh slurm-wlm munge"
    if os.geteuid() != 0:
        return "only root can start a Slurm with GPUs (mknod, and jobs of any user)"
    return ""


class SlurmCluster:
    """Nodes n1, n2, ... with `gpus` GPUs each (links to /dev/null)."""

    def __init__(self, base: Path, nodes: int = 2, gpus: int = 2, cpus: int = 8) -> None:
        self.base = base
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.env = {"SLURM_CONF": str(base / "slurm.conf"), "PATH": PATH}
        self.daemons: list[subprocess.Popen] = []
        self._make_folders(gpus)
        self._write_configuration(gpus, cpus)

    # ------------------------------------------------------------------------------- set-up

    def _make_folders(self, gpus: int) -> None:
        for name in ("log", "state", "dev", "munge", "pid"):
            (self.base / name).mkdir(parents=True)
        for node in self.nodes:
            (self.base / "spool" / node).mkdir(parents=True)
            (self.base / "tmp" / node).mkdir(parents=True)
        for i in range(gpus):
            # A GPU must be a device that exists; without a file per GPU nodes become "invalid".
            device = self.base / "dev" / f"nvidia{i}"
            os.mknod(device, 0o666 | stat.S_IFCHR, NULL_DEVICE)
        key = self.base / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)

    def _write_configuration(self, gpus: int, cpus: int) -> None:
        base, host = self.base, socket.gethostname().split(".")[0]
        controller_port, *ports = (free_port() for _ in range(1 + len(self.nodes)))
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "SlurmctldPort": controller_port,
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={base}/munge/sock",
            "StateSaveLocation": base / "state",
            "SlurmdSpoolDir": base / "spool" / "%n",
            "SlurmctldPidFile": base / "pid" / "slurmctld",
            "SlurmdPidFile": base / "pid" / "%n",
            "SlurmctldLogFile": base / "log" / "slurmctld",
            "SlurmdLogFile": base / "log" / "%n",
            "TmpFS": base / "tmp" / "%n",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "KillWait": 10,
            "MessageTimeout": 60,
            "GresTypes": "gpu",
            "MailProg": "/bin/true",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for node, port in zip(self.nodes, ports):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
                f"RealMemory=16000 Gres=gpu:{gpus}"
            )
        nodes = ",".join(self.nodes)
        lines.append(f"PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP")
        (base / "slurm.conf").write_text("\n".join(lines) + "\n")
        (base / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={base}/dev/nvidia[0-{gpus - 1}]\n"
        )

    # ---------------------------------------------------------------------------- processes

    def _start(self, *command: str) -> None:
        log = open(self.base / "log" / f"stderr-{len(self.daemons)}", "w")
        self.daemons.append(
            subprocess.Popen(
                command,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
        log.close()

    def start(self, timeout: float = 120) -> None:
        """Starts all daemons; returns when every node is idle."""
        base, conf = self.base, self.env["SLURM_CONF"]
        munge = [f"--{name}={base}/munge/{name}" for name in ("log-file", "pid-file", "seed-file")]
        self._start(
            "munged", "--foreground", "--force", f"--key-file={base}/munge/key",
            f"--socket={base}/munge/sock", *munge,
        )
        deadline = time.monotonic() + timeout
        while not (base / "munge" / "sock").exists():
            self._check_daemons(deadline, "munged makes no socket")
        self._start("slurmctld", "-D", "-c", "-f", conf)
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node, "-f", conf)
        while self._idle_nodes() != len(self.nodes):
            self._check_daemons(deadline, "nodes do not become idle")

    def _idle_nodes(self) -> int:
        states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).stdout.split()
        return states.count("idle")

    def _check_daemons(self, deadline: float, trouble: str) -> None:
        ended = [d.args for d in self.daemons if d.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
                for log in sorted((self.base / "log").iterdir())
            )
            raise RuntimeError(f"Slurm: {trouble}; ended: {ended}\n{logs}")
        time.sleep(0.05)

    def stop(self) -> None:
        """Ends jobs and daemons."""
        self.cancel_jobs()
        for daemon in reversed(self.daemons):
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()

    def __enter__(self) -> "SlurmCluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --------------------------------------------------------------------------------- jobs

    def run(
        self, *command: object, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess:
        """Runs one of Slurm's client programs; they retry for long, hence the time limit."""
        result = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=REPO_ROOT,
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result

    def cancel_jobs(self, timeout: float = 60) -> None:
        """Returns when the queue is empty and all processes of jobs are gone."""
        deadline = time.monotonic() + timeout
        while self.run("squeue", "-h", check=False).stdout and time.monotonic() < deadline:
            self.run("scancel", "--user=root", check=False)
            time.sleep(0.2)

    def submit(self, script: Path, *options: str, env: Mapping[str, str] | None = None) -> Job:
        """Queues a script with options of sbatch, from the repository's root folder."""
        log = self.base / "log" / "job-%j"
        found = self.run("sbatch", "--parsable", f"--output={log}", *options, script, env=env)
        number = found.stdout.strip()
        return Job(self, number, Path(str(log).replace("%j", number)))


class Job:
    """A job in the queue, running, or ended not long ago."""

    def __init__(self, cluster: SlurmCluster, number: str, log: Path) -> None:
        self.cluster, self.number, self.log = cluster, number, log

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def field(self, name: str) -> str:
        """A field of `scontrol show job`."""
        shown = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number).stdout
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)[name]

    def is_running_here(self) -> bool:
        """Whether its script's process has not gone yet; Slurm may know it as ended before that."""
        name = f"slurmstepd: [{self.number}.batch]"
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_text(errors="replace").startswith(name):
                    return True
            except OSError:  # that process has ended meanwhile
                continue
        return False

    def wait_for(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Polls until the condition holds; fails the test when the job ends before it does."""
        deadline = time.monotonic() + timeout
        while not condition():
            in_time = time.monotonic() < deadline and self.field("JobState") not in ENDED
            assert in_time, f"it did not come to that\n{self.show()}"
            time.sleep(0.02)

    def wait(self, timeout: float = 120) -> str:
        """Its state once it has ended: COMPLETED, FAILED, ..."""
        deadline = time.monotonic() + timeout
        while self.field("JobState") not in ENDED:
            assert time.monotonic() < deadline, f"no end after {timeout} s\n{self.show()}"
            time.sleep(0.1)
        return self.field("JobState")

    def show(self) -> str:
        """For the message of a failed test."""
        return f"job {self.number}, {self.field('JobState')}\n{self.text}"
