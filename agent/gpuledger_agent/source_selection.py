"""Selects the source of the readings: this machine, a simulated node, or a recording.

This is the agent's only module that imports the simulator, and it does so only when needed.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuledger.clock import SystemClock
from gpuledger.errors import UnavailableError, UserError
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger_agent.context import Host
from gpuledger_agent.gpu.nvidia.kernel import list_kernel_gpus
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.nvidia.system_library import SystemNvml
from gpuledger_agent.gpu.threads import CallThread
from gpuledger_agent.host.job_directory import JobFiles, job_files_in
from gpuledger_agent.host.kmsg import DeviceKmsg
from gpuledger_agent.host.kubelet.allocations import SocketKubelet
from gpuledger_agent.host.kubelet.pod_list import KubeletPodList
from gpuledger_agent.host.node_pods import PodCgroups, list_folder
from gpuledger_agent.host.procfs import SystemProcfs
from gpuledger_agent.settings import AgentSettings

if TYPE_CHECKING:
    from gpuledger_simulator.simulation import SimulatedNode

PROBE_SECONDS: Final = 20.0
_SIMULATED: Final = "simulated:"
_RECORDED: Final = "recorded:"


async def open_source(settings: AgentSettings) -> Host:
    """Find the source in a thread; raise `UserError` if the source cannot be used.

    Because of the thread, the process can handle signals while a driver or a disk does not answer.
    """
    return await in_daemon_thread(partial(find_source, settings))


def find_source(settings: AgentSettings) -> Host:
    """Return the source that the settings name; raise `UserError` if it cannot be used."""
    if settings.source == "simulated" or settings.source.startswith(_SIMULATED):
        return _simulated(settings)
    if settings.source.startswith(_RECORDED):
        return _recorded(settings)
    nvml = SystemNvml(settings.nvml_library)
    if settings.source == "auto":
        probe(nvml)
    cgroups = PodCgroups(settings.kubelet.cgroup_root)
    return Host(
        gpus=NvmlSession(nvml, kernel_gpus=partial(list_kernel_gpus, settings.procfs_root)),
        procfs=SystemProcfs(settings.procfs_root),
        clock=SystemClock(),
        kubelet=None
        if settings.kubelet.enabled is False
        else SocketKubelet(
            settings.kubelet.socket, timeout_seconds=settings.kubelet.timeout_seconds
        ),
        pod_list=_pod_list(settings),
        list_log_names=list_folder(settings.kubelet.container_log_dir),
        list_pod_folders=list_folder(settings.kubelet.pod_log_dir),
        list_pod_cgroups=cgroups.list_names,
        has_cgroup=cgroups.has_cgroup,
        read_job_files=job_files_in(settings.job_mapping_dir) if settings.job_mapping_dir else None,
        open_kmsg=partial(DeviceKmsg, settings.incidents.kmsg) if settings.incidents.kmsg else None,
    )


def _pod_list(settings: AgentSettings) -> KubeletPodList | None:
    """Return the kubelet's list of pods; `None` if the agent does not need it or has no token."""
    sources, api = settings.allocations.sources, settings.kubelet.api
    is_used = api.token_file.exists() if sources == "auto" else sources
    if not is_used and not settings.exposition.has_pod_labels:
        return None
    return KubeletPodList(api, node=settings.node_name)


def probe(library: object, *, seconds: float = PROBE_SECONDS) -> None:
    """Check that NVML answers within `seconds`; raise `UserError` if it does not."""
    nvml = NvmlSession(library)
    # Probe in a thread, so that the agent can report a driver that hangs.
    worker = CallThread("nvml-probe")
    try:
        worker.start(nvml.open).result(timeout=seconds)
    except UnavailableError as error:
        raise UserError(_explain(str(error))) from error
    except TimeoutError as error:
        raise UserError(_explain(f"no answer within {seconds:g} s")) from error
    worker.start(nvml.close).result(timeout=seconds)
    worker.end()


def _explain(detail: str) -> str:
    return (
        f"source: auto, but NVML does not answer on this machine ({detail}); --source nvml waits"
        " for it, --source simulated plays a scenario"
    )


def _simulated(settings: AgentSettings) -> Host:
    from gpuledger_simulator.simulation import DEFAULT_SCENARIO, open_simulation  # noqa: PLC0415  # real nodes do not need it in memory

    _, _, file = settings.source.partition(":")
    simulation = open_simulation(
        Path(file) if file else DEFAULT_SCENARIO,
        epoch_ns=settings.simulator.epoch_ns,
        epoch_file=settings.simulator.epoch_file,
        uids_file=settings.simulator.uids_file,
    )
    # The default scenario has one node, used under any machine name.
    node = simulation.node(settings.node_name if file else next(iter(simulation.nodes)))
    played = play(node)
    return replace(
        played,
        kubelet=None if settings.kubelet.enabled is False else played.kubelet,
        open_kmsg=node.open_kmsg if settings.incidents.kmsg else None,
    )


def find_only_node(source: str) -> str | None:
    """Return the name of the only node of a scenario file; `None` for other sources.

    Raise `UserError` if the scenario has several nodes.
    """
    if not source.startswith(_SIMULATED):
        return None
    from gpuledger_simulator.simulation import open_simulation  # noqa: PLC0415  # as above

    # Any epoch will do, because the scenario is not played.
    names = sorted(open_simulation(Path(source.removeprefix(_SIMULATED)), epoch_ns=1).nodes)
    if len(names) != 1:
        raise UserError(f"--source {source}: give --node, one of {', '.join(names)}")
    return names[0]


def play(node: "SimulatedNode") -> Host:
    """Return the interfaces of a simulated node, without its kernel log."""
    read_jobs = node.job_files
    return Host(
        gpus=NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns),
        procfs=node.procfs,
        clock=node.clock,
        kubelet=node.kubelet,
        pod_list=node.pod_list,
        list_log_names=node.kubelet.log_names,
        list_pod_folders=node.kubelet.pod_folders,
        list_pod_cgroups=node.kubelet.pod_cgroups,
        has_cgroup=node.kubelet.has_cgroup,
        read_job_files=None if read_jobs is None else (lambda: JobFiles(read_jobs())),
    )


def _recorded(settings: AgentSettings) -> Host:
    from gpuledger_agent.recording.replay import open_recording  # noqa: PLC0415  # as above

    if settings.kubelet.enabled is True:
        raise UserError(
            f"kubelet.enabled: true, but source {settings.source} has no kubelet; set it to auto"
            " or false"
        )
    if settings.job_mapping_dir:
        raise UserError(
            f"job_mapping_dir: {settings.job_mapping_dir}, but source {settings.source} plays"
            " another machine than the one whose jobs are there; remove it"
        )
    if settings.exposition.pod_labels:
        raise UserError(
            f"exposition.pod_labels: source {settings.source} has no kubelet; remove them"
        )
    clock, nvml, procfs = open_recording(Path(settings.source.removeprefix(_RECORDED)))
    # The pods' allocations and names are not recorded, and this machine's kubelet has other pods.
    gpus = NvmlSession(nvml, monotonic_ns=clock.monotonic_ns)
    return Host(gpus=gpus, procfs=procfs, clock=clock, kubelet=None, list_log_names=tuple)
