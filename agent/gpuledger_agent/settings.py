"""The agent's settings. `gpuledger.settings` loads them."""

import ipaddress
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from gpuledger.errors import SettingsError
from gpuledger.keys import NodeId
from gpuledger.ledger.series import refuse_equal_labels
from gpuledger.records.base import DEFAULT_CLUSTER, MAX_NODE_NAME_LENGTH, NodeName
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import require_cluster_name
from gpuledger_agent.dcgm_devices import parse_devices

Profile = Literal["lean", "full"]


class ExpositionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `/metrics`."""

    dcgm_names: Literal["old", "new", "both", "none"] = "old"
    """Which DCGM metric names to show: `old` (those in `counters_file`, otherwise those that
    dcgm-exporter has always had), `new` (those of DCGM 4.6), `both` or `none`."""
    native_metrics: bool = True
    """Whether to show the `gpuledger_…` metrics of GPUs and containers, in base units."""
    profile: Profile = "lean"
    """How many `gpuledger_…` metrics to show: `lean` (each GPU's use, problems and users) or `full`
    (every reading). For DCGM's metrics see `counters_file`."""
    counters_file: Path | None = None
    """List of DCGM fields to show, in dcgm-exporter's format; empty means its default list."""
    host_label: Literal["hostname", "Hostname", "none"] = "hostname"
    """Label of DCGM's metrics that contains the node name: `hostname` (as in dcgm-exporter since
    4.8.3), `Hostname` (before 4.8.3) or `none`."""
    dcgm_devices: str = "f"
    """Devices that DCGM's metrics show, as with dcgm-exporter's `--devices`: `f` or `g+i` (all),
    `g` (GPUs), `i` (MIG instances), or `g:0,2-3` (the GPUs with these indices)."""
    dcgm_old_labels: bool = False
    """Whether DCGM's metrics have the labels of dcgm-exporter 1.x, as with its
    `--use-old-namespace`: `uuid`, `pod_name`, `pod_namespace` and `container_name`."""
    pod_series: bool = False
    """Whether shared GPUs get `DCGM_FI_DEV_GPU_UTIL`, `…_FB_USED` and
    `DCGM_FI_PROF_GR_ENGINE_ACTIVE` per container too. Sums then count such GPUs twice, unless they
    select `gpuledger_share=""`."""
    dcgm_pod_uid: bool = False
    """Whether DCGM's metrics have `pod_uid` if one container has the device to itself, as with
    dcgm-exporter's option. gpuledger's own metrics of containers always have it."""
    pod_labels: Annotated[tuple[str, ...], msgspec.Meta(max_length=32)] = ()
    """Pod labels, by their Kubernetes names, added to the series of pods as `label_…`. Requires
    read permission on `kubelet.api`; not supported with recordings."""
    dcgm_pod_labels: bool = False
    """Whether DCGM's metrics have all labels of pods, as with dcgm-exporter's option: under their
    own names, with `_` for characters that Prometheus does not allow. Like `pod_labels`, it
    requires `kubelet.api`."""
    dcgm_pod_label_patterns: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Regular expressions for names of `dcgm_pod_labels`: one must match a part of the Kubernetes
    name. Empty means all labels."""
    dashes_in_model_name: bool = False
    """Whether DCGM's metrics replace blanks in `modelName` by dashes."""
    process_series: bool = False
    """Whether to show single processes: `nvidia_pid_pod` and `gpuledger_process_…`."""
    max_process_series: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 256
    """Maximum number of processes shown, those with most memory first; the others are counted."""
    stale_seconds: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    """How long to show the last values of a GPU that does not answer, in seconds; at least 3
    sampling intervals."""
    slow_stale_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """How long to show the last values of health and limits, in seconds; they are read less often
    than samples."""
    event_window_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e16)] = 300.0
    """Length of the window of `DCGM_EXP_XID_ERRORS_COUNT` and `DCGM_EXP_CLOCK_EVENTS_COUNT`, in
    seconds. Only a GPU's last 1000 events are counted."""

    @property
    def has_pod_labels(self) -> bool:
        """Whether series have labels of pods."""
        return bool(self.pod_labels) or self.dcgm_pod_labels

    def __post_init__(self) -> None:
        """Raise `ValueError` if a value of pod labels or devices is invalid."""
        refuse_equal_labels("pod_labels", self.pod_labels)
        for pattern in self.dcgm_pod_label_patterns:
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"dcgm_pod_label_patterns: {pattern!r}: {error}") from error
        try:
            parse_devices(self.dcgm_devices)
        except ValueError as error:
            raise ValueError(f"dcgm_devices: {error}") from error


_MAX_OF_A_TICK: Final = 0.8
_MAX_SHOWN: Final = 80


class SimulatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of simulated scenarios."""

    epoch_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Start time of the scenario, in nanoseconds since the Unix epoch; 0 means now. Agents of
    several nodes in one scenario need the same value."""
    epoch_file: Path | None = None
    """File that stores the start time; the first process that does not find it writes it."""
    uids_file: Path | None = None
    """File with pod UIDs of a real API server, written by `python -m gpuledger_simulator drive`."""


_HOST_NAME: Final = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,252}[A-Za-z0-9])?")
_ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeletApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kubelet's HTTPS port, which is queried only for labels and annotations of pods."""

    host: str = ""
    """Node address, `status.hostIP` of the agent's pod; empty means the node name."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 10_250
    """Kubelet port."""
    server_name: str = ""
    """Name expected in the kubelet's certificate; empty means `host`."""
    ca_file: Path = _ACCOUNT_FOLDER / "ca.crt"
    """CA certificates that verify the kubelet's certificate, PEM. The default works if the
    cluster's CA issued the kubelet's certificate (`serverTLSBootstrap`)."""
    token_file: Path = _ACCOUNT_FOLDER / "token"
    """File with the agent's token, read before each query because the kubelet renews it."""
    refresh_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    """Time between queries, in seconds; a new pod on the GPUs causes a query with the next
    sample."""
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Timeout of one query, from connecting to the last byte, in seconds."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if `host` or `server_name` is invalid."""
        for setting, name in (("host", self.host), ("server_name", self.server_name)):
            if name and not _is_host(name):
                raise ValueError(
                    f"{setting}: expected an IP address or a host's name, got {name!r}"
                )

    def url_on(self, node: str) -> str:
        """Return the URL of the pod list for the node with this name."""
        host = self.host or node
        return f"https://{f'[{host}]' if ':' in host else host}:{self.port}/pods"


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(_HOST_NAME.fullmatch(name))
    return True


class KubeletSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node's kubelet, which reports the container to which each device is allocated."""

    enabled: bool | Literal["auto"] = "auto"
    """Whether to query the kubelet. `auto` queries it if its socket exists. With `true`, a missing
    socket fails the check `kubelet` (a warning), and recordings are rejected."""
    socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """The kubelet's pod-resources socket; only root can open it."""
    refresh_seconds: Annotated[float, msgspec.Meta(ge=1, le=600)] = 10.0
    """Time between queries while nothing changes, in seconds. If pods or processes on GPUs start or
    end, the next sample starts a query."""
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Timeout of one query, in seconds."""
    cache_ttl_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 120.0
    """How long the last answer stays valid without a new one, in seconds, for example while the
    kubelet restarts."""
    resource_names: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = (
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/gpu-*",
        "nvidia.com/mig-*",
        "nvidia.com/vgpu",
        "aliyun.com/gpu-mem",
        "volcano.sh/vgpu-number",
    )
    """Resources whose devices are GPUs or parts of GPUs; `*` matches any text. Always included:
    claims of `gpu.nvidia.com`, and devices whose id is the UUID of a GPU of the node."""
    admin_access_namespaces: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Namespaces whose resource claims have admin access (`adminAccess`) and so allocate no GPU.
    They have the label `resource.kubernetes.io/admin-access`, which the kubelet does not report."""
    container_log_dir: Path = Path("/var/log/containers")
    """Directory of links to the containers' logs; their names contain the pod and container."""
    pod_log_dir: Path = Path("/var/log/pods")
    """Directory of the pods' logs; its subdirectories' names contain the pods' UIDs and show new
    pods."""
    cgroup_root: Path = Path("/sys/fs/cgroup")
    """Mount point of the node's cgroups. A pod's new cgroup starts a kubelet query; a pod without a
    cgroup has no device. Without the mount, pods have devices while the kubelet lists them."""
    api: KubeletApiSettings = KubeletApiSettings()
    """Settings of the kubelet's HTTPS port, used for `exposition.pod_labels` and
    `allocations.sources`."""

    @property
    def is_queried(self) -> bool:
        """Whether the agent queries a kubelet, as far as is known now."""
        return self.socket.exists() if self.enabled == "auto" else self.enabled


class AllocationsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of GPUs that schedulers write into annotations of pods."""

    sources: (
        Literal["auto"]
        | Annotated[
            tuple[Literal["hami", "volcano", "gpushare", "koordinator", "kai"], ...],
            msgspec.Meta(max_length=5),
        ]
    ) = "auto"
    """Products whose annotations state shares. `auto` means all if `kubelet.api.token_file` exists,
    otherwise none. An empty list means none."""
    placeholder_namespaces: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = (
        "kai-resource-reservation",
        "runai-reservation",
    )
    """Namespaces of reservation pods, which reserve GPUs for other pods; nothing is allocated to
    reservation pods."""


class IncidentsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of incidents in addition to the driver's events."""

    kmsg: Path | None = None
    """Kernel log to read for XIDs missing in the driver's events, `/dev/kmsg`; empty means none.
    Reading it requires additional privileges; simulated nodes have their own log."""
    slowdown_seconds: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    """How long the hardware must slow the clocks down without a break before an incident begins, in
    seconds. The incident ends after an equally long time without a slowdown. Checked every
    `readings_seconds`."""


class SpoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The on-disk spool for samples while Kafka is unavailable."""

    directory: str = "/var/spool/gpuledger"
    """Spool directory, which must exist; the agent creates a subdirectory for its node. Empty means
    that samples wait in memory only."""
    max_bytes: Annotated[int, msgspec.Meta(ge=2**20, le=2**40)] = 256 * 2**20
    """Maximum size of the spooled frames, in bytes; above it the oldest are dropped."""
    max_age_seconds: Annotated[float, msgspec.Meta(ge=1, le=30 * 86400)] = 3600.0
    """Maximum age of spooled samples, in seconds; older ones are dropped. Samples of earlier boots
    are as old as the current boot."""
    min_free_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 2**30
    """Disk space to leave free, in bytes; the spool does not write below it."""
    spill_after_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0
    """How long a sample waits in memory for Kafka before it is spooled, in seconds."""
    catch_up_factor: Annotated[float, msgspec.Meta(ge=2, le=1000)] = 50.0
    """Maximum rate of sending spooled samples, in multiples of the sampling rate; agents reduce
    it randomly, by up to half, to spare the brokers."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `gpuledger agent`."""

    cluster: str = DEFAULT_CLUSTER
    """Name of the node's Kubernetes cluster, a DNS label; the same as podwatch's. Each cluster on
    one Kafka needs its own name."""
    node_name: str = ""
    """The node's name in Kubernetes; empty means the variable NODE_NAME, or else the hostname, in
    lowercase if the node has a kubelet."""
    source: str = "auto"
    """GPU data source: `nvml`, `simulated` (a small built-in scenario), `simulated:FILE` (a
    scenario), `recorded:FILE` (from `gpuledger record-nvml`) or `auto` (NVML if available)."""
    nvml_library: Path | None = None
    """The driver's library `libnvidia-ml.so.1` or its directory. Empty means the dynamic linker,
    then the directories used by the container toolkit, GPU Operator, GKE and WSL."""
    procfs_root: Path = Path("/proc")
    """Mount point of the machine's `/proc`."""
    sampling_interval_seconds: Annotated[float, msgspec.Meta(ge=0.25, le=60)] = 1.0
    """Sampling interval, in seconds."""
    first_sample_seconds: Annotated[float, msgspec.Meta(ge=0.01, le=60)] = 0.25
    """Length of the first sampling interval, in seconds; short, so that values appear soon."""
    gpu_timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.8
    """How long a sample waits for a GPU's answers, in seconds; later answers are left out. Limited
    to 80 % of the sampling interval."""
    fast_poll_interval_seconds: Annotated[float, msgspec.Meta(ge=0.02, le=60)] = 0.1
    """Interval of fast polls of GPUs that are shared, have short-lived processes or use process
    accounting, in seconds; the sampling interval or more disables them."""
    attribution: bool | Literal["auto"] = "auto"
    """Whether to read processes. `auto` reads them if `/proc` is the whole machine's, because the
    driver reports the machine's own PIDs."""
    kubelet: KubeletSettings = KubeletSettings()
    """Settings of the node's kubelet."""
    allocations: AllocationsSettings = AllocationsSettings()
    """Settings of allocations that the kubelet does not report."""
    readings_seconds: Annotated[float, msgspec.Meta(ge=0.25, le=30)] = 5.0
    """How often to read values that attribution does not use, such as throttling and traffic, in
    seconds; the sampling interval or less means each sample."""
    job_mapping_dir: Path | None = None
    """Directory in which a scheduler lists each GPU's jobs, as for dcgm-exporter's
    `--hpc-job-mapping-dir`; empty means none. Simulated nodes have their own."""
    health_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 10.0
    """How often to read each GPU's health, limits and hardware, in seconds."""
    watchdog_seconds: Annotated[float, msgspec.Meta(ge=10, le=86_400)] = 300.0
    """Maximum time without an answer from any GPU, in seconds; after it, the process ends so that
    it is restarted."""
    queue_samples: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 600
    """Maximum number of samples in memory while neither Kafka nor the spool accepts them; above it
    the oldest are dropped."""
    spool: SpoolSettings = SpoolSettings()
    """Settings of the on-disk spool."""
    flush_seconds: Annotated[float, msgspec.Meta(ge=0, le=5)] = 4.0
    """How long to try to publish queued samples at shutdown, in seconds."""
    no_kafka: bool = False
    """Whether to run without Kafka: readings appear only on `/metrics`."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-agent")
    """Settings of the Kafka client."""
    exposition: ExpositionSettings = ExpositionSettings()
    """Settings of the content of `/metrics`."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9820")
    """Settings of the HTTP server for health and metrics."""
    log: LogSettings = LogSettings()
    """Settings of the logs."""
    incidents: IncidentsSettings = IncidentsSettings()
    """Settings of incident detection."""
    simulator: SimulatorSettings = SimulatorSettings()
    """Settings of simulated scenarios."""

    @property
    def poll_timeout_seconds(self) -> float:
        """How long a tick waits for a GPU's answers, in seconds.

        It is `gpu_timeout_seconds`, but at most 80 % of the sampling interval.
        """
        return min(self.gpu_timeout_seconds, _MAX_OF_A_TICK * self.sampling_interval_seconds)

    @property
    def node(self) -> NodeId:
        """The node's key; valid after `name_node` has filled in the name."""
        return NodeId(self.cluster, self.node_name)

    def __post_init__(self) -> None:
        """Raise `ValueError` if the cluster's name or the source is invalid."""
        require_cluster_name(self.cluster)
        kind, _, file = self.source.partition(":")
        if self.source not in ("auto", "nvml", "simulated") and not (
            kind in ("simulated", "recorded") and file
        ):
            raise ValueError(
                "source: expected auto, nvml, simulated[:FILE] or recorded:FILE, got"
                f" {self.source!r}"
            )


S = TypeVar("S", bound=AgentSettings)


def name_node(settings: S, environ: Mapping[str, str]) -> S:
    """Return the settings with the node's name filled in; raise `SettingsError` if it is invalid.

    If neither `node_name` nor NODE_NAME is set, the name is the hostname. On a node with a kubelet,
    it is in lowercase, like the node name from the kubelet.
    """
    if settings.node_name:
        origin, name = "node_name", settings.node_name
    elif environ.get("NODE_NAME"):
        origin, name = "NODE_NAME", environ["NODE_NAME"]
    else:
        origin, name = "hostname", platform.node().strip()
        if settings.kubelet.is_queried:
            name = name.lower()
    try:
        msgspec.convert(name, NodeName)
    except msgspec.ValidationError as error:
        shown = repr(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}…")
        raise SettingsError(
            f"{origin}: invalid node name: {shown} (letters, digits, '-', '_' and '.', at most"
            f" {MAX_NODE_NAME_LENGTH} characters); in Kubernetes, set NODE_NAME to the node's"
            " metadata.name; the shipped DaemonSet sets it from spec.nodeName"
        ) from error
    return msgspec.structs.replace(settings, node_name=name)
