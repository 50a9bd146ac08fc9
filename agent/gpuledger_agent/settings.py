"""The settings of the agent. Loading them is `gpuledger.settings`' business."""

import ipaddress
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from gpuledger.errors import SettingsError
from gpuledger.keys import NodeId
from gpuledger.ledger.series import refuse_equal_labels
from gpuledger.records.base import DEFAULT_CLUSTER, MAX_NODE_NAME_LENGTH, NodeName
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import require_cluster_name

Profile = Literal["lean", "full"]


class ExpositionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the node shows of its GPUs on `/metrics`."""

    dcgm_names: Literal["old", "new", "both", "none"] = "old"
    """Which of DCGM's names to show: those that dcgm-exporter has always had, those of DCGM 4.6,
    both together, or none."""
    native_metrics: bool = True
    """Whether to show `gpuledger_…` metrics of GPUs and containers, in base units."""
    profile: Profile = "lean"
    """How many of them: `lean` shows what each GPU does, what is wrong with it and who is on it,
    `full` every reading. DCGM's metrics are chosen by `counters_file` instead."""
    counters_file: Path | None = None
    """DCGM's fields to show, a list in dcgm-exporter's format; absent means its default list."""
    host_label: Literal["hostname", "Hostname", "none"] = "hostname"
    """The label of DCGM's metrics that names the node; dcgm-exporter's has been `hostname` since
    May 2026, and `Hostname` before."""
    pod_series: bool = False
    """Whether a GPU that no one container has to itself gets a series of `DCGM_FI_DEV_GPU_UTIL`,
    `…_FB_USED` and `DCGM_FI_PROF_GR_ENGINE_ACTIVE` for each container on it, beside its own: a sum
    over one of these families then counts the GPU twice, unless it takes `gpuledger_share=""`."""
    dcgm_pod_uid: bool = False
    """Whether DCGM's metrics of a device that one container has to itself have `pod_uid`, as
    dcgm-exporter's with its own option. gpuledger's own metrics of containers always have it."""
    pod_labels: Annotated[tuple[str, ...], msgspec.Meta(max_length=32)] = ()
    """The labels of pods that stand on the series of pods, as `label_…`, by their names in
    Kubernetes. They are asked of the kubelet's HTTPS port (`kubelet.api`), for which the agent
    needs a right; without any nothing is asked. A recording has no kubelet, and refuses them."""
    dashes_in_model_name: bool = False
    """Whether DCGM's metrics have dashes in place of the blanks in `modelName`."""
    process_series: bool = False
    """Whether to show single processes: `nvidia_pid_pod` and `gpuledger_process_…`."""
    max_process_series: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 256
    """The most processes shown, those that hold most memory first; the others are counted."""
    stale_seconds: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    """For how long a GPU that does not answer any more is still shown, and no less than 3 ticks."""
    slow_stale_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """For how long health and limits, which are asked every few seconds, are still shown."""
    event_window_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e16)] = 300.0
    """Length of the window of `DCGM_EXP_XID_ERRORS_COUNT` and `DCGM_EXP_CLOCK_EVENTS_COUNT`; as
    long as dcgm-exporter's may be. At most the last 1000 events of a GPU are counted."""

    def __post_init__(self) -> None:
        """Refuse labels that would be one label of a series; raises `ValueError`."""
        refuse_equal_labels("pod_labels", self.pod_labels)


_MAX_OF_A_TICK: Final = 0.8
_MAX_SHOWN: Final = 80


class SimulatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a scenario is played, where the source is simulated."""

    epoch_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    """When the scenario's second 0 is, nanoseconds since the Unix epoch; 0 means at the start.
    Agents of several nodes that play one scenario together need the same one."""
    epoch_file: Path | None = None
    """A file that holds the epoch; the first process to look for it writes it."""
    uids_file: Path | None = None
    """Pod UIDs of a real API server, in a file by `python -m gpuledger_simulator drive`."""


_HOST_NAME: Final = re.compile(r"[A-Za-z0-9]([-.A-Za-z0-9]{0,252}[A-Za-z0-9])?")
_ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeletApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kubelet's HTTPS port, asked for the labels of the node's pods alone."""

    host: str = ""
    """The node's address, `status.hostIP` of the agent's own pod; empty means the node's name."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 10_250
    """The kubelet's port."""
    server_name: str = ""
    """What its certificate must name, where that is not the `host`."""
    ca_file: Path = _ACCOUNT_FOLDER / "ca.crt"
    """Authorities to trust for its certificate, PEM: the cluster's where the kubelet has its
    certificate of it (`serverTLSBootstrap`)."""
    token_file: Path = _ACCOUNT_FOLDER / "token"
    """The agent's token there, read for each question, as the kubelet renews a projected one."""
    refresh_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    """Time from one question to the next; where a pod is new on the GPUs it is asked within a
    second."""
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """How long one question may take, from the connection to the last byte."""

    def __post_init__(self) -> None:
        """Refuse what is no address; raises `ValueError`."""
        for setting, name in (("host", self.host), ("server_name", self.server_name)):
            if name and not _is_host(name):
                raise ValueError(
                    f"{setting}: expected an IP address or a host's name, got {name!r}"
                )

    def url_on(self, node: str) -> str:
        """Return the address of the list of pods, where the node is called so."""
        host = self.host or node
        return f"https://{f'[{host}]' if ':' in host else host}:{self.port}/pods"


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(_HOST_NAME.fullmatch(name))
    return True


class KubeletSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the node's kubelet is asked: which container holds which device."""

    enabled: bool | Literal["auto"] = "auto"
    """Whether to ask it. `auto` asks wherever its socket is, and takes no offence where it is not;
    `true` fails the check `kubelet` while it does not answer, a warning: the agent stays ready.
    A recording has no kubelet, and `true` is refused there."""
    socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """Its socket for pod resources; root's alone."""
    refresh_seconds: Annotated[float, msgspec.Meta(ge=1, le=600)] = 10.0
    """Time from one question to the next while nothing changes; where pods have come or gone, or
    processes on GPUs, it is asked as the next tick begins."""
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """How long to wait for an answer."""
    cache_ttl_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 120.0
    """For how long the last answer counts while there is no new one, such as during the kubelet's
    restart."""
    resource_names: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = (
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/gpu-*",
        "nvidia.com/mig-*",
        "nvidia.com/vgpu",
        "aliyun.com/gpu-mem",
        "volcano.sh/vgpu-number",
    )
    """Resources whose devices are GPUs or parts of them; `*` stands for any text. Claims of
    `gpu.nvidia.com` are always read."""
    admin_access_namespaces: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Namespaces whose resource claims are for admin access (`adminAccess`): they hold nothing of
    the GPUs that they are given. The kubelet does not say it of a claim; Kubernetes allows it in
    namespaces alone that have the label `resource.kubernetes.io/admin-access`."""
    container_log_dir: Path = Path("/var/log/containers")
    """Where the runtime links the containers' logs; the links' names tell pod and container."""
    pod_log_dir: Path = Path("/var/log/pods")
    """Where the kubelet keeps the pods' logs; the folders' names tell each pod's UID, and that pods
    have come."""
    cgroup_root: Path = Path("/sys/fs/cgroup")
    """The node's cgroups: where one has come the kubelet is asked, and a pod whose cgroup is gone
    holds no device any more, though the kubelet lists it on. Where the node's are not mounted
    there, pods hold as long as they are listed."""
    api: KubeletApiSettings = KubeletApiSettings()
    """The kubelet's HTTPS port, where `exposition.pod_labels` names any."""


class IncidentsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where incidents are looked for, beside the driver's own events."""

    kmsg: Path | None = None
    """The kernel's log, `/dev/kmsg`, read for XIDs that never reach the driver's events; absent
    means not at all, as reading it takes rights that the agent does without. A simulated node has
    its own log, whatever the path."""
    slowdown_seconds: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    """For how long the hardware holds a GPU's clocks down without a break, for the temperature or
    as the machine's power supply asks for it, before that is an incident; it ends likewise. It is
    looked at every `readings_seconds`."""


class SpoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk that takes the ticks while Kafka is away."""

    directory: str = "/var/spool/gpuledger"
    """Where the ticks wait; empty means in memory only, and so does a folder that does not exist:
    the agent makes only one for its node inside it."""
    max_bytes: Annotated[int, msgspec.Meta(ge=2**20, le=2**40)] = 256 * 2**20
    """Maximum size of the frames there, in bytes; above it the oldest are dropped."""
    max_age_seconds: Annotated[float, msgspec.Meta(ge=1, le=30 * 86400)] = 3600.0
    """What has lain there for longer is dropped rather than sent; by the time since boot, which
    nobody can set. What an earlier boot left counts as no older than this one is."""
    min_free_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 2**30
    """Free space that is left to others: below it nothing is written."""
    spill_after_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0
    """How long a tick waits in memory for Kafka before it goes to the disk."""
    catch_up_factor: Annotated[float, msgspec.Meta(ge=2, le=1000)] = 50.0
    """How many times faster than they were made waiting ticks are sent at most; by chance down to
    half of it, so that a fleet's return does not flood the brokers."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `gpuledger agent` can be told."""

    cluster: str = DEFAULT_CLUSTER
    """The Kubernetes cluster that the node is in, a DNS label; the same as podwatch's. Names of
    nodes and pods are unique in it alone, so that each cluster on one Kafka has a name of its own.
    """
    node_name: str = ""
    """The node's name in Kubernetes; empty means the variable NODE_NAME, else the host's name."""
    source: str = "auto"
    """Where readings come from: `nvml`, `simulated:FILE` (a scenario; without `:FILE` a
    small one of one node), `recorded:FILE` (of `gpuledger record-nvml`), or `auto`, which is `nvml`
    after a look whether NVML answers."""
    nvml_library: Path | None = None
    """The driver's library, `libnvidia-ml.so.1` or the folder in which it is; no other one is tried
    then. Absent means where the dynamic linker finds it, else in the folders where the container
    toolkit, the GPU Operator, GKE and WSL have it."""
    procfs_root: Path = Path("/proc")
    """Where the machine's `/proc` is mounted."""
    sampling_interval_seconds: Annotated[float, msgspec.Meta(ge=0.25, le=60)] = 1.0
    """Time from one tick to the next."""
    first_sample_seconds: Annotated[float, msgspec.Meta(ge=0.01, le=60)] = 0.25
    """Length of the first interval; short, so that there is something to see soon."""
    gpu_timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.8
    """How long a tick waits for a GPU's answers; a GPU that is later is not in that tick. Never
    more than four fifths of a tick, so that one that hangs does not make the others' ticks late."""
    fast_poll_interval_seconds: Annotated[float, msgspec.Meta(ge=0.02, le=60)] = 0.1
    """Time from one look to the next, between ticks, at GPUs that are watched closely: several
    containers share them and their driver gives one sample a process, their processes come and go,
    or their driver keeps accounts. A driver's window is a sixth of a second or longer: it needs a
    look in each. As long as a tick or longer means never."""
    attribution: bool | Literal["auto"] = "auto"
    """Whether processes are read. `auto` reads them where `/proc` is the whole machine's, as the
    driver names processes by the machine's own pids."""
    kubelet: KubeletSettings = KubeletSettings()
    """The node's kubelet."""
    readings_seconds: Annotated[float, msgspec.Meta(ge=0.25, le=30)] = 5.0
    """How often a GPU is asked for the readings that no tick is booked from: throttling, traffic,
    utilization of encoders, and most of the chip's own counters; each GPU at another time. As long
    as a tick or shorter means each tick."""
    job_mapping_dir: Path | None = None
    """The directory in which a scheduler such as Slurm says which jobs hold which GPUs, as
    dcgm-exporter's `--hpc-job-mapping-dir`: a file for each GPU, called by its index, or by
    `<index>.<GPU instance>`, with a job's id on each line; absent means that nobody is asked. A
    simulated node has its own, whatever the path."""
    health_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 10.0
    """How often a GPU is asked for its health, its limits and what is built into it."""
    watchdog_seconds: Annotated[float, msgspec.Meta(ge=10, le=86_400)] = 300.0
    """The process ends, so that it is started afresh, when no GPU has answered for so long."""
    queue_samples: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 600
    """Ticks kept in memory while neither Kafka nor the spool takes them; then the oldest is
    dropped."""
    spool: SpoolSettings = SpoolSettings()
    """Where ticks wait while Kafka is away."""
    flush_seconds: Annotated[float, msgspec.Meta(ge=0, le=5)] = 4.0
    """At the end: how long to try to publish what is queued."""
    no_kafka: bool = False
    """Whether to do without Kafka: nothing is published, the readings are shown on `/metrics`."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-agent")
    """The brokers."""
    exposition: ExpositionSettings = ExpositionSettings()
    """What `/metrics` shows of the node's GPUs."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9820")
    """Health and metrics."""
    log: LogSettings = LogSettings()
    """Logs."""
    incidents: IncidentsSettings = IncidentsSettings()
    """What is watched for incidents."""
    simulator: SimulatorSettings = SimulatorSettings()
    """The played scenario."""

    @property
    def poll_timeout_seconds(self) -> float:
        """How long a tick waits for a GPU's answers, ticks shorter than the deadline included."""
        return min(self.gpu_timeout_seconds, _MAX_OF_A_TICK * self.sampling_interval_seconds)

    @property
    def node(self) -> NodeId:
        """What the node is called, once `name_node` has filled it in."""
        return NodeId(self.cluster, self.node_name)

    def __post_init__(self) -> None:
        """Refuse a cluster that cannot be one, and an unknown source; raises `ValueError`."""
        require_cluster_name(self.cluster)
        kind, _, file = self.source.partition(":")
        if self.source not in ("auto", "nvml", "simulated") and not (
            kind in ("simulated", "recorded") and file
        ):
            raise ValueError(
                "source: expected auto, nvml, simulated[:FILE] or recorded:FILE, got"
                f" {self.source!r}"
            )


def name_node(settings: AgentSettings, environ: Mapping[str, str]) -> AgentSettings:
    """Return the settings with the node's name filled in; raises `SettingsError` for a bad one.

    The host's name is lowercased, as the kubelet does with it.
    """
    if settings.node_name:
        origin, name = "node_name", settings.node_name
    elif environ.get("NODE_NAME"):
        origin, name = "NODE_NAME", environ["NODE_NAME"]
    else:
        origin, name = "the host's name", platform.node().strip().lower()
    try:
        msgspec.convert(name, NodeName)
    except msgspec.ValidationError as error:
        shown = repr(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}…")
        raise SettingsError(
            f"{origin}: {shown} is no name of a Kubernetes node (lowercase letters, digits, '-' and"
            f" '.', {MAX_NODE_NAME_LENGTH} characters at most): set NODE_NAME to the node's"
            " metadata.name, as the shipped DaemonSet does from spec.nodeName"
        ) from error
    return msgspec.structs.replace(settings, node_name=name)
