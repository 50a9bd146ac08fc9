"""The settings of `gpuledger sink`: common ones, and a section for each kind."""

import re
from collections.abc import Collection
from pathlib import Path
from string import Formatter
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.series import SentLabels, label_of, refuse_equal_labels
from gpuledger.ledger.usage import COUNTERS
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import (
    parse_listen,
    require_cluster_name,
    require_group_name,
    require_http_url,
)
from gpuledger.settings.secret import shown_url
from gpuledger.store.object_files import require_store_uri
from gpuledger.texts import find_near
from gpuledger.topics import Topics
from gpuledger_sinks.receiver_settings import ReceiverSettings, Sigv4Settings
from gpuledger_sinks.registry import KINDS, SCALER

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Pause = Annotated[float, msgspec.Meta(ge=0)]
RESERVED_HEADERS = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "proxy-authorization",
        "transfer-encoding",
        "user-agent",
        "x-prometheus-remote-write-version",
    }
)


def _fields_in(setting: str, template: str, known: Collection[str]) -> set[str]:
    """Return the field names in a template.

    Raises ValueError if the template is invalid, or if a field is unknown or has a format.
    """
    try:
        parsed = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(
            f"{setting}: invalid template: {error}; write {{{{ and }}}} for literal braces"
        ) from error
    # A format could contain a width of billions, which would make a text of that length.
    if any(spec or conversion for _, _, spec, conversion in parsed):
        raise ValueError(
            f"{setting}: formats and conversions are not supported; write only a name between"
            f" braces, such as {{{max(known)}}}"
        )
    fields = {name or "" for _, name, _, _ in parsed}
    if unknown := sorted(fields.difference(known)):
        raise ValueError(
            f"{setting}: unknown field: {{{unknown[0]}}}; use one of"
            f" {', '.join(f'{{{name}}}' for name in sorted(known))}"
        )
    return fields


RemoteWriteProtocol = Literal["auto", "1.0", "2.0"]


class RemoteWriteSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sink that sends samples: destination, credentials and limits."""

    url: str = "http://localhost:9090/api/v1/write"
    """Remote-write endpoint of the receiver."""
    sigv4: Sigv4Settings = Sigv4Settings()
    """Signatures of requests for AWS, instead of other credentials."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Additional headers, such as `X-Scope-OrgID`. The protocol's own headers cannot be set."""
    protocol: RemoteWriteProtocol = "auto"
    """Version of remote-write: `"1.0"` or `"2.0"` (in YAML with quotes), or `auto`: 2.0, or 1.0 if
    the receiver does not support 2.0."""
    timeout_seconds: Seconds = 30.0
    """Timeout of one request, in seconds."""
    external_labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Additional labels of every series, such as `replica`. `cluster` comes from the records."""
    interval_seconds: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 15.0
    """Interval between samples of a series, in seconds of node time: gauges are sent as mean and
    maximum, counters exactly. 0 sends every agent sample."""
    pod_labels: list[str] = msgspec.field(default_factory=list)
    """Kubernetes names of pod labels to add to `gpuledger_pod_info` as `label_…`. podwatch must
    keep them as well (its setting `labels`)."""
    namespace_labels: list[str] = msgspec.field(default_factory=list)
    """Kubernetes names of namespace labels to add to `gpuledger_namespace_info` as `label_…`."""
    node_labels: list[str] = msgspec.field(default_factory=list)
    """Kubernetes names of node labels to add to `gpuledger_node_description_info` as `label_…`."""
    health_interval_seconds: Seconds = 10.0
    """Interval between samples of GPU health (errors, throttling, links, incidents), in seconds.
    Agents read health every 10 s."""
    samples_per_request: Count = 10_000
    """Maximum number of samples per request. One node's samples of one time are never split."""
    commit_interval_seconds: Pause = 5.0
    """Minimum time between commits of offsets and counters per partition, in seconds. After a
    crash, samples sent since are sent again. 0 commits after each poll."""
    queue_bytes: Count = 16_777_216
    """Maximum size of events waiting to be sent, in bytes as stored in Kafka, shared equally by the
    assigned partitions. One poll may exceed it."""
    final_statuses: list[Literal[401, 403, 404]] = msgspec.field(default_factory=list)
    """Which of these HTTP statuses send samples to the dead-letter topic. The others are retried,
    because they usually mean wrong credentials or a wrong address."""
    poison_seconds: Pause = 600.0
    """Time after which a sample goes to the dead-letter topic if the receiver fails on it (5xx) but
    accepts others, in seconds. 0 retries without limit."""
    max_future_seconds: Seconds = 300.0
    """Maximum time in the future, in seconds; later samples go to the dead-letter topic. The limit
    is 10 s for a minute after a clock leapt ahead."""
    max_age_seconds: Pause = 0.0
    """Maximum age of samples, in seconds; older ones go to the dead-letter topic. Match the
    receiver's limit (`out_of_order_time_window`). 0 disables it."""
    stale_after_seconds: Seconds = 60.0
    """Time without events after which a node's series are ended, in seconds."""
    max_series_bytes: Count = 134_217_728
    """Maximum memory for labels of active series, in bytes, about 200 per series. Above it, the
    nodes that have sent nothing for longest are forgotten."""
    max_series_per_node: Natural = 10_000
    """Maximum number of series of pods and jobs on a node. Further pods and jobs are counted and
    not sent. 0 disables the limit."""
    max_poll_records: Count = 500
    """Maximum number of events per poll."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for values that cannot be used."""
        try:
            require_http_url(self.url)
        except ValueError as error:
            raise ValueError(f"url {error}") from error
        self.refuse_unusable(url=[self.url], sigv4=self.sigv4)
        refuse_reserved(self.headers)
        refuse_reserved(dict.fromkeys(self.header_files, ""), setting="header_files")
        refuse_unusable_labels(self.external_labels)
        for setting in ("pod_labels", "namespace_labels", "node_labels"):
            refuse_equal_labels(setting, getattr(self, setting), self.external_labels)

    @property
    def sent_labels(self) -> SentLabels:
        """The Kubernetes labels to add to the info series."""
        return SentLabels(
            pods=tuple(self.pod_labels),
            namespaces=tuple(self.namespace_labels),
            nodes=tuple(self.node_labels),
        )


OWN_LABELS: Final = {"cluster", "node"}.union(
    *(family.labels for family in (*FAMILIES, COUNTERS, *HEALTH_FAMILIES, *INCIDENT_FAMILIES))
)
"""The labels of gpuledger's own series."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LABEL_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def refuse_unusable_labels(labels: dict[str, str]) -> None:
    """Raise ValueError for a label that cannot be added to gpuledger's series."""
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(
                f"external_labels: invalid Prometheus label name: {name!r}; use letters, digits"
                " and _"
            )
        if name in OWN_LABELS:
            raise ValueError(f"external_labels: reserved label: {name}; remove it")
        if not value:
            raise ValueError(f"external_labels: empty value: {name}; set a value or remove it")


def refuse_reserved(headers: dict[str, str], *, setting: str = "headers") -> None:
    """Raise ValueError for an invalid header, or one reserved for the protocol or credentials."""
    for name, value in headers.items():
        if name.lower() in RESERVED_HEADERS:
            raise ValueError(
                f"{setting}: reserved header: {name}; remove it (credentials have settings)"
            )
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{setting}: invalid HTTP header name: {name!r}; rename it")
        # A line break would begin another header or end the request.
        if any(not character.isprintable() and character != "\t" for character in value):
            raise ValueError(f"{setting}: control character in the value of {name}; remove it")


ALERT_ADDRESS_FIELDS: Final = frozenset(
    {"alertname", "category", "cluster", "gpu_uuid", "kind", "node", "severity", "xid"}
)
"""Labels of an alert that may be inserted into its addresses."""
_ALERT_LABELS: Final = ALERT_ADDRESS_FIELDS | {
    "container",
    "gpu_index",
    "gpu_instance",
    "namespace",
    "owner_kind",
    "owner_name",
    "pod",
}


def _refuse_label_of_alert(labels: dict[str, str]) -> None:
    """Raise ValueError if an external label has the name of an alert's own label."""
    for name in labels:
        if name in _ALERT_LABELS or name.startswith(("label_", "namespace_label_")):
            raise ValueError(f"external_labels: reserved label: {name}; remove it")


def _refuse_equal_labels(setting: str, names: list[str]) -> None:
    """Raise ValueError if two Kubernetes labels have the same name on an alert, or one is empty."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(label_of(name), name)
        if other != name:
            raise ValueError(
                f"{setting}: {other} and {name} would be the same label of an alert; remove one"
            )
        if not name:
            raise ValueError(f"{setting}: empty label name; remove it")


_API_PATH: Final = re.compile(r"/api/v[12](?:/alerts)?/*\Z")


def _refuse_api_path(url: str) -> None:
    """Raise ValueError if an address ends with the API path, which is added later."""
    # Alertmanager's documentation shows addresses with this path; all alerts would get a 404.
    if _API_PATH.search(urlsplit(url).path):
        shown = shown_url(url)
        raise ValueError(
            f"urls: must not end with the API path, which is added: {shown!r}; use"
            f" {_API_PATH.sub('', shown)}"
        )


def _refuse_address(setting: str, template: str) -> None:
    """Raise ValueError unless a template is empty or makes a valid address."""
    _fields_in(setting, template, ALERT_ADDRESS_FIELDS)
    if template:
        try:
            require_http_url(template.format(**dict.fromkeys(ALERT_ADDRESS_FIELDS, "x")))
        except ValueError as error:
            raise ValueError(f"{setting}: {error}") from error


class AlertsSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sink that sends alerts: destinations and durations."""

    ADDRESS: ClassVar[str] = "urls"

    urls: list[str] = msgspec.field(default_factory=lambda: ["http://localhost:9093"])
    """Addresses of all Alertmanagers of the cluster, without a load balancer, and without
    `/api/v2/alerts`, which is added."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Additional headers, such as `X-Scope-OrgID`. The protocol's own headers cannot be set."""
    external_labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Additional labels of every alert, such as `region`. `cluster` comes from the records."""
    pod_labels: list[str] = msgspec.field(default_factory=list)
    """Pod labels to add to an incident's alert: `team` becomes `label_team`. podwatch must keep
    them as well."""
    namespace_labels: list[str] = msgspec.field(default_factory=list)
    """Namespace labels to add to an incident's alert: `team` becomes `namespace_label_team`.
    podwatch must keep them as well."""
    runbook_url: str = ""
    """Template of the annotation `runbook_url`, with the fields `{alertname}`, `{kind}`, `{xid}`,
    `{category}`, `{severity}`, `{cluster}`, `{node}` and `{gpu_uuid}`. Empty omits it."""
    generator_url: str = ""
    """Template of an alert's source link, such as a GPU dashboard; fields as in `runbook_url`."""
    timeout_seconds: Seconds = 10.0
    """Timeout of one request, in seconds."""
    resend_seconds: Seconds = 60.0
    """Interval at which a firing alert is sent again, in seconds. It ends after four intervals
    without an update."""
    incident_hold_seconds: Seconds = 300.0
    """Time for which an incident's alert fires, in seconds, from the first acceptance by an
    Alertmanager. Alerts of states fire at least that long."""
    incident_age_seconds: Seconds = 3600.0
    """Maximum age of incidents, in seconds. Older ones are counted and not sent, for example after
    a long outage."""
    state_stale_after_seconds: Seconds = 86_400.0
    """Time after which the alert of a state, such as a lost GPU, ends if no sample mentions the
    GPU, in seconds."""
    max_poll_records: Count = 500
    """Maximum number of records per poll."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for values that cannot be used."""
        if not self.urls:
            raise ValueError("urls: empty list; give at least one Alertmanager")
        for url in self.urls:
            try:
                require_http_url(url)
            except ValueError as error:
                raise ValueError(f"urls: {error}") from error
            _refuse_api_path(url)
        self.refuse_unusable(urls=self.urls)
        refuse_reserved(self.headers)
        refuse_reserved(dict.fromkeys(self.header_files, ""), setting="header_files")
        refuse_unusable_labels(self.external_labels)
        _refuse_label_of_alert(self.external_labels)
        _refuse_equal_labels("pod_labels", self.pod_labels)
        _refuse_equal_labels("namespace_labels", self.namespace_labels)
        _refuse_address("runbook_url", self.runbook_url)
        _refuse_address("generator_url", self.generator_url)


_LONGEST_SECONDS: Final = 10_000_000_000
"""Maximum of settings in seconds, about three centuries. Nanoseconds since 1970 cannot represent a
longer time."""


_UNUSABLE_IN_FOLDERS: Final = frozenset("[]^|%\\")


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sink that stores rows: location, flushing and limits."""

    uri: Name = "/var/lib/gpuledger/store"
    """Directory or object-store URI of the store. Each table has its own subdirectory."""
    storage_options: dict[str, str] = {}
    """Object-store options, as deltalake names them; `<option>_file` names a file with the value.
    Without credentials here, the environment or the machine's role provides them."""
    entries: bool = False
    """Whether to store every sample in the table `entries` as well, one row per entry: about
    330 million rows (26 GB) per day for a thousand GPUs."""
    flush_seconds: Pause = 30.0
    """Maximum time before rows are written, in seconds."""
    flush_rows: Count = 100_000
    """Number of rows that triggers a write."""
    flush_bytes: Count = 268_435_456
    """Approximate size of rows in memory that triggers a write, in bytes. A single event may exceed
    it by a few hundred megabytes."""
    max_age_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_SECONDS)] = 2_678_400.0
    """Maximum age of rows, in seconds, by day; older events go to the dead-letter topic. The
    default is 31 days. Raise it to store older events."""
    max_future_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_SECONDS)] = 86_400.0
    """Maximum time of rows ahead of this machine's clock, in seconds, by day; later events go to
    the dead-letter topic."""
    generation: str = ""
    """Part of the name under which offsets are stored. Change it after a topic was recreated."""
    max_poll_records: Count = 500
    """Maximum number of events per poll."""

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown scheme, and for a name that deltalake 1.6 misreads."""
        try:
            require_store_uri(self.uri)
        except ValueError as error:
            raise ValueError(f"`uri`: {error}") from error
        wrong = sorted(set(self.uri) & _UNUSABLE_IN_FOLDERS)
        if wrong and "://" not in self.uri:
            raise ValueError(
                f"`uri`: unsupported characters in a directory name: {' '.join(wrong)}; rename it"
            )


_OWN_ROWS: Final = Topics().rows.name


class RowsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sink that writes flat rows."""

    topic: Name = _OWN_ROWS
    """Topic for the rows. Rows keep their event's partition number, modulo this topic's number of
    partitions. Default: the installation's topic, including `kafka.topic_prefix`."""
    commit_interval_seconds: Pause = 0.1
    """Pause between transactions unless a poll was full, in seconds. Every transaction has a fixed
    cost, however few rows it contains."""
    max_future_seconds: Seconds = 300.0
    """Maximum time in the future, in seconds; later samples go to the dead-letter topic. Engines
    that use event time would consider everything after them late."""
    max_poll_records: Count = 500
    """Maximum number of events per poll, and therefore per transaction."""

    def in_installation(self, topics: Topics) -> "RowsSettings":
        """Return the settings; the default topic is replaced by this installation's topic."""
        if self.topic != _OWN_ROWS:
            return self
        return msgspec.structs.replace(self, topic=topics.rows.name)


class ScalerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sink that answers KEDA."""

    listen: str = "0.0.0.0:9826"
    """Address for KEDA's calls over gRPC, `host:port`."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster whose workloads KEDA scales, as set for its agents."""
    cert_file: Path | None = None
    """Certificate of the server with its chain, PEM file. Empty: no TLS."""
    key_file: Path | None = None
    """Private key of the certificate, PEM file."""
    client_ca_file: Path | None = None
    """CA certificates that verify client certificates, PEM file. Empty: clients need none."""
    window_seconds: Annotated[float, msgspec.Meta(ge=1, le=600)] = 15.0
    """Length of the window over which use is averaged, in seconds of event time. It must be longer
    than the sampling interval plus the delay of events."""
    stale_after_seconds: Annotated[float, msgspec.Meta(ge=1, le=3_600)] = 60.0
    """Time after which a node without samples is forgotten, in seconds. Until then, the use of its
    workloads is an error."""
    max_workloads: Count = 10_000
    """Maximum number of workloads in the window; the pods of further ones are counted and left
    out."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for values that cannot be used."""
        try:
            parse_listen(self.listen)
        except ValueError as error:
            raise ValueError(f"listen: {error}") from error
        require_cluster_name(self.cluster)
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file: set it together with key_file")
        if self.client_ca_file and not self.cert_file:
            raise ValueError("client_ca_file: needs cert_file and key_file too")
        if self.stale_after_seconds < self.window_seconds:
            raise ValueError("stale_after_seconds: shorter than window_seconds; raise it")


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a sink. Sections of other kinds are checked but not used."""

    kind: str = ""
    """Kind of sink: `remote_write`, `alerts`, `store`, `rows` or `scaler`."""
    group: str = ""
    """Consumer group; empty means the kind's own, such as `gpuledger-remote-write`. Sinks of one
    group share its events. `store` ignores it and follows its table; `scaler` has no group."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-sink")
    """Connection to the brokers."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9823")  # a pod's probes come from outside
    """Address for health and metrics."""
    log: LogSettings = LogSettings()
    """Log written to standard error."""
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    """Settings of the sink that sends samples."""
    alerts: AlertsSettings = AlertsSettings()
    """Settings of the sink that sends alerts."""
    store: StoreSettings = StoreSettings()
    """Settings of the sink that stores rows."""
    rows: RowsSettings = RowsSettings()
    """Settings of the sink that writes flat rows for SQL engines."""
    scaler: ScalerSettings = ScalerSettings()
    """Settings of the sink that answers KEDA."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid group or an unknown kind, with the nearest known kind."""
        if self.group:
            require_group_name(self.group)
        kinds = (*KINDS, SCALER)
        if self.kind in kinds:
            return
        if not self.kind:
            raise ValueError(f"kind: missing value; run gpuledger sink {'|'.join(kinds)}")
        near = find_near(self.kind, kinds)
        remedy = f"did you mean {near!r}?" if near else f"give {', '.join(kinds)}"
        raise ValueError(f"kind: unknown sink: {self.kind!r}; {remedy}")
