"""A node's files: `/proc` of the current processes, the kernel log and a scheduler's job files.

Only the few files that agents read are simulated, in the kernel's own format. Paths are the paths
on the node.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuledger.clock import NS_PER_SECOND, NS_PER_US, Clock
from gpuledger_simulator.identities import pci_bus_id
from gpuledger_simulator.plan import PlannedIncident, PlannedPod, PlannedProcess
from gpuledger_simulator.schema import ScenarioJob

_TICK_NS: Final = 10_000_000
_KTHREADD: Final = b"2 (kthreadd) S 0 0 0 0 -1 2129984 " + b"0 " * 8 + b"20 0 1 0 1 0 0\n"
_V1_CONTROLLERS: Final = (
    "12:pids",
    "11:memory",
    "10:devices",
    "9:cpu,cpuacct",
    "8:freezer",
    "1:name=systemd",
)


class SimulatedProcfs:
    """The files of one node's `/proc`."""

    def __init__(
        self,
        processes: Iterable[PlannedProcess],
        *,
        clock: Clock,
        epoch_ns: int,
        boot_id: str,
        cgroup_driver: str,
        uid_of: Callable[[PlannedPod], str | None],
        host_pid: bool = True,
        memory_bytes: int,
    ) -> None:
        # In a container's own pid namespace, the processes of the host are not visible.
        self._processes: dict[int, list[PlannedProcess]] = {}
        for process in processes if host_pid else ():
            self._processes.setdefault(process.pid, []).append(process)
        self._host_pid = host_pid
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._boot_id = boot_id
        self._cgroup_driver = cgroup_driver
        self._uid_of = uid_of
        self._files: dict[str, Callable[[PlannedProcess], str]] = {
            "cgroup": self._cgroup,
            "comm": lambda process: f"{process.comm}\n",
            "stat": self._stat,
            "cmdline": lambda process: process.spec.command.replace(" ", "\0") + "\0",
        }

    def read(self, path: str) -> bytes:
        """Return a file's bytes; raise `FileNotFoundError` if the file does not exist now."""
        if path == "/proc/sys/kernel/random/boot_id":
            return f"{self._boot_id}\n".encode()
        if path == "/proc/meminfo":
            # In every namespace, this file shows the memory of the node.
            return f"MemTotal:       {self._memory_bytes >> 10} kB\nMemFree: 1024 kB\n".encode()
        if path == "/proc/2/stat" and self._host_pid:
            return _KTHREADD
        parts = path.split("/")
        if len(parts) != 4 or parts[1] != "proc" or not parts[2].isdigit():  # noqa: PLR2004  # "/proc/PID/FILE"
            raise FileNotFoundError(path)
        write = self._files.get(parts[3])
        since_ns = self._clock.time_ns() - self._epoch_ns
        # Several processes may have the same pid, one after the other.
        own = self._processes.get(int(parts[2]), ())
        process = next((one for one in own if one.alive(since_ns)), None)
        if process is None or write is None:
            raise FileNotFoundError(path)
        return write(process).encode()

    def _stat(self, process: PlannedProcess) -> str:
        started_ns = (
            process.start_ns + self._epoch_ns - (self._clock.time_ns() - self._clock.boottime_ns())
        )
        before = f"{process.pid} ({process.comm}) S 1 {process.pid} {process.pid} 0 -1 4194560"
        return f"{before} {'0 ' * 8}20 0 1 0 {started_ns // _TICK_NS} {'0 ' * 29}0\n"

    def _cgroup(self, process: PlannedProcess) -> str:
        path = process.host_cgroup or self._pod_path(process)
        if self._cgroup_driver != "v1":
            return f"0::{path}\n"
        return "".join(f"{controller}:{path}\n" for controller in _V1_CONTROLLERS)

    def _pod_path(self, process: PlannedProcess) -> str:
        pod = process.pod
        uid = self._uid_of(pod) if pod else None
        if pod is None or uid is None:
            # A kubelet cannot start a pod before the API server has assigned the pod's UID.
            raise FileNotFoundError(f"/proc/{process.pid}/cgroup")
        # Guaranteed pods are directly below the directory of all pods; other classes have a
        # directory of their own.
        is_guaranteed, qos = pod.spec.qos == "guaranteed", pod.spec.qos
        if self._cgroup_driver != "systemd":
            parent = "/kubepods" if is_guaranteed else f"/kubepods/{qos}"
            return f"{parent}/pod{uid}/{process.container_id}"
        # A dash in the name of a systemd slice means nesting, so dashes in a UID become
        # underscores.
        name = "kubepods" if is_guaranteed else f"kubepods-{qos}"
        parent = "/kubepods.slice" if is_guaranteed else f"/kubepods.slice/{name}.slice"
        pod_slice = f"{name}-pod{uid.replace('-', '_')}.slice"
        return f"{parent}/{pod_slice}/cri-containerd-{process.container_id}.scope"


class SimulatedJobFiles:
    """The directory in which a scheduler's prolog and epilog record the GPUs of each job."""

    def __init__(self, jobs: Sequence[ScenarioJob], *, clock: Clock, epoch_ns: int) -> None:
        self._jobs = jobs
        self._clock = clock
        self._epoch_ns = epoch_ns

    def read(self) -> dict[str, bytes]:
        """Return the current contents of the files, by file name."""
        since_seconds = (self._clock.time_ns() - self._epoch_ns) / NS_PER_SECOND
        files: dict[str, bytes] = {}
        for job in self._jobs:
            end_seconds = job.end_seconds
            if since_seconds < job.start_seconds or (
                end_seconds is not None and since_seconds >= end_seconds
            ):
                continue
            instance = "" if job.gpu_instance is None else f".{job.gpu_instance}"
            for gpu in job.gpus:
                name = f"{gpu}{instance}"
                files[name] = files.get(name, b"") + f"{job.id}\n".encode()
        return files


_KERNEL_WARNING: Final = 4


class SimulatedKmsg:
    """An open `/dev/kmsg` with the driver's XID messages; each read returns one record.

    Reading starts at the end of the log, as after a seek to the end.
    """

    def __init__(
        self, incidents: Sequence[PlannedIncident], *, clock: Clock, epoch_ns: int
    ) -> None:
        self._clock = clock
        self._epoch_ns = epoch_ns
        now_ns = clock.time_ns() - epoch_ns
        self._boot_ns = now_ns - clock.boottime_ns()
        self._incidents = [
            incident
            for incident in incidents
            if incident.spec.reported_by != "nvml" and incident.spec.xid is not None
        ]
        self._read = sum(incident.time_ns < now_ns for incident in self._incidents)

    def read(self) -> bytes:
        """Return the next record; raise `BlockingIOError` if there is none yet."""
        now_ns = self._clock.time_ns() - self._epoch_ns
        if self._read >= len(self._incidents) or self._incidents[self._read].time_ns > now_ns:
            raise BlockingIOError
        incident = self._incidents[self._read]
        self._read += 1
        # The log's timestamps count from boot, so steps of the wall clock do not affect them.
        stamp_us = (incident.time_ns - self._boot_ns) // NS_PER_US
        spec = incident.spec
        # In the driver's format: a short domain, and no function number.
        bus = pci_bus_id(spec.gpu)[4:-2].lower()
        instance = "" if spec.gpu_instance is None else f" GPU-I:{spec.gpu_instance:02d}"
        if spec.compute_instance is not None:
            instance += f" GPU-CI:{spec.compute_instance:02d}"
        pid = "'<unknown>'" if spec.pid is None else str(spec.pid)
        line = f"Xid (PCI:{bus}{instance}): {spec.xid}, pid={pid}, name=<unknown>, {spec.text}"
        return f"{_KERNEL_WARNING},{1000 + self._read},{stamp_us},-;NVRM: {line}\n".encode()

    def close(self) -> None:
        """Close the log."""
