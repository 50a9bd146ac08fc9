"""What can be set on podwatch. Values only; reading them is `gpuledger.settings`'s business."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import Seconds, require_cluster_name, require_http_url

ALL_LABELS: Final = "*"
RETRY_MAX_FACTOR: Final = 1.25
"""How many times as long as asked for the pause between two attempts may be, by chance."""
Count = Annotated[int, Meta(ge=1)]


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which API server is watched, and how patiently."""

    url: str = ""
    """Address of an API server without credentials, such as kubectl proxy; goes before the rest."""
    kubeconfig: str = ""
    """Path of a kubeconfig file; empty: the pod's service account, else KUBECONFIG or ~/.kube."""
    context: str = ""
    """Context in that file; empty: its current one."""
    watch_list: Literal["auto", "off"] = "auto"
    """Whether to list objects as a watch where the server offers that; `off` asks for pages."""
    page_limit: Count = 500
    """How many objects to ask for in one page of a list."""
    page_timeout_seconds: Seconds = 60.0
    """How long one page may take."""
    connect_timeout_seconds: Seconds = 10.0
    """How long a connection may take to open, TLS included."""
    watch_timeout_seconds: Seconds = 300.0
    """How long the server is asked to keep a watch open, at least; at most twice as long."""
    idle_timeout_seconds: Seconds = 90.0
    """After how long without a byte a watch is begun anew, in case its connection is dead."""
    backoff_first_seconds: Seconds = 1.6
    """The first pause after a failure; each is by chance between half and the whole of it."""
    backoff_max_seconds: Seconds = 30.0
    """The longest pause after failures in a row."""

    def __post_init__(self) -> None:
        """Refuse an address that is none and pauses in the wrong order; raises `ValueError`."""
        if self.url:
            try:
                require_http_url(self.url)
            except ValueError as error:
                raise ValueError(f"url {error}") from error
        if self.backoff_first_seconds > self.backoff_max_seconds:
            raise ValueError("backoff_first_seconds is more than backoff_max_seconds")


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of several podwatches publishes: the one that holds a Lease of the API server."""

    enabled: bool = False
    """Whether a Lease is held; off, this podwatch publishes however many others do."""
    name: str = "gpuledger-podwatch"
    """Name of the Lease; it is made where it is missing."""
    namespace: str = ""
    """Its namespace; empty: that of the pod's service account."""
    identity: str = ""
    """Under which name it is held, another one for each podwatch; empty: host name and a UUID."""
    duration_seconds: Seconds = 15.0
    """For how long others take a holder that says nothing for alive."""
    renew_deadline_seconds: Seconds = 10.0
    """How long a holder that cannot renew goes on."""
    retry_seconds: Seconds = 2.0
    """How often the Lease is renewed, and asked for by those who wait."""

    def __post_init__(self) -> None:
        """Refuse times with which two could publish at once; raises `ValueError`."""
        if self.duration_seconds <= self.renew_deadline_seconds:
            raise ValueError("duration_seconds must be more than renew_deadline_seconds")
        if self.renew_deadline_seconds <= RETRY_MAX_FACTOR * self.retry_seconds:
            raise ValueError(
                f"renew_deadline_seconds must be more than {RETRY_MAX_FACTOR:g} retry_seconds"
            )
        if self.duration_seconds < 1:
            raise ValueError("duration_seconds must be at least 1: a Lease counts in seconds")


class PodwatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `gpuledger podwatch`."""

    cluster: str = DEFAULT_CLUSTER
    """The Kubernetes cluster that is watched, a DNS label; the same as its agents'. Each cluster on
    one Kafka has a name of its own; records of other clusters are left alone."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-podwatch")
    """Where the records are published."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9821")
    """Where health and metrics are served."""
    log: LogSettings = LogSettings()
    """How the log is written."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Which API server is watched."""
    lease: LeaseSettings = LeaseSettings()
    """Which of several podwatches publishes."""
    labels: list[str] = msgspec.field(
        default_factory=lambda: [
            "app",
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/part-of",
            "team",
            "project",
            "cost-center",
        ]
    )
    """Labels of pods to carry along; `*` carries all of them."""
    annotations: list[str] = msgspec.field(default_factory=list)
    """Annotations of pods to carry along, by their full names."""
    gpu_resource_prefixes: list[str] = msgspec.field(
        default_factory=lambda: [
            "nvidia.com/",
            "aliyun.com/gpu",
            "volcano.sh/vgpu-",
            "volcano.sh/gpu-",
        ]
    )
    """A container resource whose name begins with one of these counts as a GPU request."""
    node_labels: list[str] = msgspec.field(default_factory=list)
    """Labels of nodes to carry along; `*` carries all of them."""
    node_pool_labels: list[str] = msgspec.field(default_factory=list)
    """Labels that name a node's pool, before those of the known providers."""
    node_instance_type_labels: list[str] = msgspec.field(default_factory=list)
    """Labels that name a node's kind of machine, before `node.kubernetes.io/instance-type`."""
    node_zone_labels: list[str] = msgspec.field(default_factory=list)
    """Labels that name a node's zone, before `topology.kubernetes.io/zone`."""
    node_region_labels: list[str] = msgspec.field(default_factory=list)
    """Labels that name a node's region, before `topology.kubernetes.io/region`."""
    node_capacity_type_labels: list[str] = msgspec.field(default_factory=list)
    """Labels that say how a node was bought (`spot`, `on-demand`, `reserved`, ...), before those of
    the known providers."""
    namespace_labels: list[str] = msgspec.field(
        default_factory=lambda: ["team", "project", "cost-center"]
    )
    """Labels of namespaces to carry along; `*` carries all of them."""
    namespace_annotations: list[str] = msgspec.field(default_factory=list)
    """Annotations of namespaces to carry along, by their full names."""
    tombstone_after_seconds: Seconds = 900.0
    """How long a deleted object's record stays before a tombstone lets compaction drop it."""
    max_tombstones: Count = 100_000
    """How many deleted objects of a kind wait for that at most; beyond it the oldest waits no
    longer."""
    publish_batch: Count = 5000
    """How many objects are published in one go at most."""

    def __post_init__(self) -> None:
        """Refuse a cluster that cannot be one, and all annotations, which can be long.

        Raises `ValueError`.
        """
        require_cluster_name(self.cluster)
        for name in ("annotations", "namespace_annotations"):
            if ALL_LABELS in getattr(self, name):
                raise ValueError(f"{name} has {ALL_LABELS}: name those that are wanted")
