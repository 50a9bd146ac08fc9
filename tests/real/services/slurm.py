"""A Slurm cluster of one node, with accounting, as root and without systemd."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import subprocess
from functools import partial
from typing import TYPE_CHECKING

from tests.real.services.ports import free_ports
from tests.real.services.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

READY_SECONDS = 60.0
NVIDIA_MAJOR = 195
"""The major number of NVIDIA's device files; Slurm rejects plain files."""


class Slurm:
    """A node with GPUs `0` to `gpu_count - 1` of Slurm, which are device files without a device."""

    def __init__(
        self,
        *,
        programs: Mapping[str, Path],
        folder: Path,
        gpu_count: int,
        scripts: Mapping[str, Path],
    ) -> None:
        """Write the configuration; `scripts` are settings such as `Prolog` and their programs."""
        self._folder, self._programs = folder, programs
        for name in ("dev", "state", "spool", "database"):
            (folder / name).mkdir(parents=True)
        for number in range(gpu_count):
            device = os.makedev(NVIDIA_MAJOR, number)
            os.mknod(folder / "dev" / f"nvidia{number}", 0o666 | stat.S_IFCHR, device)
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-{gpu_count - 1}]\n")
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainDevices=no\n"
        )
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        self._ports = database, accounting = free_ports(2)
        text = _configuration(folder, gpu_count, {"AccountingStoragePort": accounting, **scripts})
        (folder / "slurm.conf").write_text(text)
        (folder / "slurmdbd.conf").touch(mode=0o600)
        (folder / "slurmdbd.conf").write_text(_accounting(folder, database, accounting))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes = [
            self._process(
                "munged",
                *("--foreground", "--force"),  # pytest's folders are only for their owner
                *(f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")),
                *(f"--key-file={key}", f"--seed-file={folder}/munge.seed"),
            ),
            self._process(
                "mariadbd",
                *("--no-defaults", "--user=root", "--skip-grant-tables"),
                *(f"--datadir={folder}/database", f"--socket={folder}/mariadb.socket"),
                *("--bind-address=127.0.0.1", f"--port={database}"),
            ),
            self._process("slurmdbd", "-D"),
            self._process("slurmctld", "-D", "-c"),
            self._process("slurmd", "-D"),
        ]

    def start(self) -> None:
        """Start the daemons, and wait until the node accepts jobs."""
        munged, mariadbd, slurmdbd, slurmctld, slurmd = self._processes
        munged.start()
        munged.wait_until((self._folder / "munge.socket").exists, deadline_seconds=READY_SECONDS)
        for process, port in zip((mariadbd, slurmdbd), self._ports, strict=True):
            process.start()
            process.wait_until(partial(_answers, port), deadline_seconds=READY_SECONDS)
        slurmctld.start()
        slurmd.start()
        self.wait_until(lambda: self.run("sinfo", "--noheader", "--format=%t").strip() == "idle")

    def wait_until(self, probe: Callable[[], bool]) -> None:
        """Wait until `probe` returns true; raises PartError if slurmd ends first."""
        self._processes[-1].wait_until(probe, deadline_seconds=READY_SECONDS)

    def run(self, program: str, *arguments: str) -> str:
        """Return the output of a client such as `sbatch`; empty if it fails."""
        ended = subprocess.run(
            [self._programs[program], *arguments],
            env=os.environ | self.environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.stdout if ended.returncode == 0 else ""

    def discard(self) -> None:
        """End the jobs and the daemons, and delete the database."""
        self.run("scancel", "--user=root")
        for process in reversed(self._processes):
            process.stop()
        shutil.rmtree(self._folder / "database")

    def _process(self, name: str, *arguments: str) -> Process:
        return Process(
            name=name,
            argv=[self._programs[name], *arguments],
            folder=self._folder,
            environment=self.environment,
        )


def _answers(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port)).close()
    return True


def _accounting(folder: Path, database: int, accounting: int) -> str:
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "DbdHost": "localhost",
        "DbdPort": accounting,
        "SlurmUser": "root",
        "PidFile": folder / "slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": database,
        "StorageUser": "root",
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _configuration(folder: Path, gpu_count: int, others: Mapping[str, object]) -> str:
    host, (controller, daemon) = socket.gethostname().split(".")[0], free_ports(2)
    settings = {
        "ClusterName": "tests",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "SlurmUser": "root",
        "SlurmctldPort": controller,
        "SlurmdPort": daemon,
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/cgroup",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "GresTypes": "gpu",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "MailProg": "/bin/true",
        "PrologFlags": "Alloc",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "localhost",
        "AccountingStoragePass": folder / "munge.socket",
        "AccountingStorageTRES": "gres/gpu",
        **others,
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs=4 CoresPerSocket=4 RealMemory=500"
        f" Gres=gpu:{gpu_count}",
        "PartitionName": "gpu Nodes=ALL Default=YES State=UP",
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())
