"""The doctor's checks of a GPU node: driver, processes, kubelet and cgroups.

They use the agent's own interfaces and settings, so they find the same problems as an agent with
the same user and the same mounts.
"""

from functools import partial
from pathlib import Path
from typing import Final

from gpuledger.errors import UnavailableError
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.texts import counted
from gpuledger_agent.context import Host
from gpuledger_agent.host.kubelet.messages import KubeletError, parse_answer
from gpuledger_agent.host.procfs import check_procfs
from gpuledger_agent.settings import AgentSettings, KubeletSettings
from gpuledger_cli.doctor.verdicts import Verdict, ok, problem, skipped

_V2: Final = "cgroup.controllers"
"""A file that only the root of cgroup version 2 has."""
_PODS: Final = ("kubepods.slice", "kubepods")


async def check_driver(host: Host) -> list[Verdict]:
    """Open the driver with the agent's code, and count the GPUs that answer."""
    # The thread is abandoned if the driver hangs until the check's deadline.
    return await in_daemon_thread(partial(_open_driver, host))


def _open_driver(host: Host) -> list[Verdict]:
    action = "Run `nvidia-smi` on the node. If it works, set the agent's `nvml_library`."
    try:
        gpus = host.gpus.open()
        versions = host.gpus.versions()
    except UnavailableError as error:
        return [problem(f"the driver does not answer: {error}", action)]
    try:
        unfound = host.gpus.unfound
        version = versions.get("driver_version") or "of unknown version"
        text = f"driver {version}, {counted(len(gpus), 'GPU')}"
        if unfound:
            return [
                problem(
                    f"{text}, without an answer from {', '.join(unfound.values())}",
                    "Drain the node, read `nvidia-smi -q`, and reset the GPU.",
                )
            ]
        return [ok(text)] if gpus else [problem(text, action)]
    finally:
        host.gpus.close()


async def check_processes(host: Host, settings: AgentSettings) -> list[Verdict]:
    """Check that `/proc` shows the processes of the whole machine."""
    access = await in_daemon_thread(partial(check_procfs, host.procfs, wanted=settings.attribution))
    if access.matches_setting:
        return [ok(access.detail)]
    return [problem(access.detail, "Set hostPID: true, or mount the machine's /proc.")]


async def check_kubelet(host: Host, settings: KubeletSettings) -> list[Verdict]:
    """Query the kubelet's socket for the containers with devices."""
    if host.kubelet is None:
        return [skipped("kubelet.enabled is false, or the source has no kubelet")]
    if settings.enabled == "auto" and not settings.is_queried:
        return [
            skipped(
                f"there is no socket {settings.socket}",
                "On a Kubernetes node, mount its directory. Otherwise, ignore this row.",
            )
        ]
    try:
        pods = parse_answer(await host.kubelet.list_pods())
    except (KubeletError, ValueError) as error:
        return [
            problem(
                f"{settings.socket}: {error}",
                "Follow the remedy for the reason in docs/reference/agent.md, Allocations.",
            )
        ]
    count = sum(1 for pod in pods for container in pod.containers if container.devices)
    return [ok(f"the kubelet lists {counted(count, 'container')} with devices")]


async def check_cgroups(settings: KubeletSettings) -> list[Verdict]:
    """Check that the node's cgroups are mounted."""
    return await in_daemon_thread(partial(_find_cgroups, settings.cgroup_root))


def _find_cgroups(root: Path) -> list[Verdict]:
    hierarchies = [root] if (root / _V2).exists() else sorted(root.glob("*/"))
    if not any((each / "cgroup.procs").exists() or (each / _V2).exists() for each in hierarchies):
        return [
            problem(
                f"{root} has no cgroups",
                "Mount the node's /sys/fs/cgroup, or set the agent's `kubelet.cgroup_root`.",
            )
        ]
    version = 2 if hierarchies == [root] else 1
    if any((each / name).is_dir() for each in hierarchies for name in _PODS):
        return [ok(f"{root}: cgroup version {version}, with the kubelet's pods")]
    return [ok(f"{root}: cgroup version {version}, without pods")]
