"""The settings of podwatch. `gpuledger.settings` loads them."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import Seconds, require_cluster_name, require_http_url

ALL_LABELS: Final = "*"
RETRY_MAX_FACTOR: Final = 1.25
"""Maximum of the random factor on the pause between two attempts."""
Count = Annotated[int, Meta(ge=1)]


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connection to the API server, timeouts and retries."""

    url: str = ""
    """Address of an API server without credentials, such as `kubectl proxy`. Takes precedence over
    `kubeconfig` and the service account."""
    kubeconfig: str = ""
    """Path of a kubeconfig file. Empty: the pod's service account, else `KUBECONFIG` or
    `~/.kube/config`."""
    context: str = ""
    """Context in the kubeconfig file. Empty: its current context."""
    watch_list: Literal["auto", "off"] = "auto"
    """How to list objects: `auto` (through a watch, if the server supports it) or `off` (in pages).
    """
    page_limit: Count = 500
    """Maximum number of objects per page of a list."""
    page_timeout_seconds: Seconds = 60.0
    """Maximum time for one page of a list, in seconds."""
    connect_timeout_seconds: Seconds = 10.0
    """Maximum time to open a connection, including TLS, in seconds."""
    watch_timeout_seconds: Seconds = 300.0
    """Minimum time that the server is asked to keep a watch open, in seconds. The maximum is twice
    as long."""
    idle_timeout_seconds: Seconds = 90.0
    """Time without data after which a watch is reopened, in case its connection is dead, in
    seconds."""
    backoff_first_seconds: Seconds = 1.6
    """First pause after a failure, in seconds. Each pause is randomly shortened by up to half."""
    backoff_max_seconds: Seconds = 30.0
    """Maximum pause after consecutive failures, in seconds."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the address is invalid or the first pause exceeds the maximum."""
        if self.url:
            try:
                require_http_url(self.url)
            except ValueError as error:
                raise ValueError(f"url {error}") from error
        if self.backoff_first_seconds > self.backoff_max_seconds:
            raise ValueError("backoff_first_seconds must not exceed backoff_max_seconds")

    def is_configured(self, environ: Mapping[str, str]) -> bool:
        """Return whether an API server is configured: here, by KUBECONFIG, or in a pod."""
        variables = (environ.get("KUBECONFIG"), environ.get("KUBERNETES_SERVICE_HOST"))
        return any((self.url, self.kubeconfig, *variables))


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leader election among several podwatches through a Lease in the API server."""

    enabled: bool = False
    """Whether to publish only while holding a Lease. If off, this podwatch always publishes."""
    name: str = "gpuledger-podwatch"
    """Name of the Lease, which is created if it does not exist."""
    namespace: str = ""
    """Namespace of the Lease. Empty: the namespace of the pod's service account."""
    identity: str = ""
    """Identity of this podwatch in the Lease, unique per podwatch. Empty: host name and a UUID."""
    duration_seconds: Seconds = 15.0
    """Time after the last renewal before another podwatch may take the Lease, in seconds."""
    renew_deadline_seconds: Seconds = 10.0
    """Time after which a leader that cannot renew the Lease stops, in seconds."""
    retry_seconds: Seconds = 2.0
    """Interval at which the leader renews the Lease and others try to acquire it, in seconds."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the times would allow two podwatches to publish at once."""
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
    """Name of the watched Kubernetes cluster, a DNS label, same as its agents' setting. Unique per
    Kafka; records of other clusters are not touched."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-podwatch")
    """Connection to Kafka."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9821")
    """HTTP endpoint for health and metrics."""
    log: LogSettings = LogSettings()
    """Log output."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Connection to the API server."""
    lease: LeaseSettings = LeaseSettings()
    """Leader election."""
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
    """Pod labels to publish. `*` publishes all of them."""
    annotations: list[str] = msgspec.field(default_factory=list)
    """Pod annotations to publish, by full name."""
    gpu_resource_prefixes: list[str] = msgspec.field(
        default_factory=lambda: [
            "nvidia.com/gpu",
            "nvidia.com/mig-",
            "nvidia.com/vgpu",
            "aliyun.com/gpu",
            "koordinator.sh/gpu",
            "tencent.com/vcuda-",
            "volcano.sh/vgpu-",
            "volcano.sh/gpu-",
        ]
    )
    """Name prefixes of container resources that count as GPU requests. Network cards, such as
    `nvidia.com/mlnxnics`, do not."""
    node_labels: list[str] = msgspec.field(default_factory=list)
    """Node labels to publish. `*` publishes all of them."""
    node_pool_labels: list[str] = msgspec.field(default_factory=list)
    """Labels with a node's pool. They take precedence over those of known providers."""
    node_instance_type_labels: list[str] = msgspec.field(default_factory=list)
    """Labels with a node's instance type. They take precedence over
    `node.kubernetes.io/instance-type`."""
    node_zone_labels: list[str] = msgspec.field(default_factory=list)
    """Labels with a node's zone. They take precedence over `topology.kubernetes.io/zone`."""
    node_region_labels: list[str] = msgspec.field(default_factory=list)
    """Labels with a node's region. They take precedence over `topology.kubernetes.io/region`."""
    node_capacity_type_labels: list[str] = msgspec.field(default_factory=list)
    """Labels with a node's capacity type (`spot`, `on-demand`, `reserved`, ...). They take
    precedence over those of known providers."""
    namespace_labels: list[str] = msgspec.field(
        default_factory=lambda: ["team", "project", "cost-center"]
    )
    """Namespace labels to publish. `*` publishes all of them."""
    namespace_annotations: list[str] = msgspec.field(default_factory=list)
    """Namespace annotations to publish, by full name."""
    tombstone_after_seconds: Seconds = 900.0
    """Time to keep a deleted object's record before a tombstone lets compaction remove it, in
    seconds."""
    max_tombstones: Count = 100_000
    """Maximum number of deleted objects per kind that wait for their tombstone. Above it, the
    oldest get theirs early."""
    publish_batch: Count = 5000
    """Maximum number of objects that are published at once."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for an invalid cluster name and for `*` as an annotation.

        Annotations can be long, so all of them cannot be published.
        """
        require_cluster_name(self.cluster)
        for name in ("annotations", "namespace_annotations"):
            if ALL_LABELS in getattr(self, name):
                raise ValueError(f"{name}: invalid value: {ALL_LABELS}; list the names to publish")
