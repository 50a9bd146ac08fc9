"""The settings of `gpuledger-sink`: what all kinds have, and a section for each kind."""

import re
from collections.abc import Collection, Iterable
from string import Formatter
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from gpuledger.ledger.aliases import AliasSeries
from gpuledger.ledger.dcgm import DcgmSeries
from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.hardware import HardwareSeries
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.series import SentLabels, refuse_equal_labels
from gpuledger.ledger.usage import COUNTERS
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import require_group_name, require_http_url
from gpuledger.settings.secret import shown_url
from gpuledger.texts import find_near
from gpuledger.topics import Topics
from gpuledger_sinks.otlp_names import OF_RESOURCES
from gpuledger_sinks.receiver_settings import ReceiverSettings, Sigv4Settings
from gpuledger_sinks.registry import KINDS, REMOTE_WRITE

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


class OpenMetricsSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is scraped in place of Kafka, and by what login."""

    url: str = ""
    """The page to scrape, OpenMetrics or Prometheus' text format; empty means that Kafka is read.
    `--from-openmetrics` gives it."""
    job: Name = "openmetrics"
    """The label `job` of all that is scraped; `instance` is the page's host and port."""
    interval_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=3_600)] = 1.0
    """How often it is scraped."""
    timeout_seconds: Pause = 0.0
    """How long a scrape may take; 0 means as long as the interval."""
    max_body_bytes: Count = 16_777_216
    """A page that has more than so many bytes, unpacked, is a scrape that failed."""
    max_samples: Count = 200_000
    """A page that has more samples is a scrape that failed."""

    def __post_init__(self) -> None:
        """Refuse what cannot be scraped; raises ValueError naming the field."""
        if self.url:
            try:
                require_http_url(self.url)
            except ValueError as error:
                raise ValueError(f"url {error}") from error
        if self.timeout_seconds > self.interval_seconds:
            raise ValueError("timeout_seconds: a scrape may not take longer than interval_seconds")
        self.refuse_unusable(url=[self.url])

    @property
    def deadline_seconds(self) -> float:
        """How long a scrape may take."""
        return self.timeout_seconds or self.interval_seconds


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which series go to which tenant of a receiver that has several."""

    of_namespace: str = ""
    """The tenant of what is of a namespace, in which `{namespace}` and `{cluster}` stand for its
    own, such as `team-{namespace}`; empty means that all goes to one tenant."""
    shared: str = ""
    """The tenant of all else: devices, nodes, and what is nobody's."""
    header: Name = "X-Scope-OrgID"
    """The header that names the tenant: that of Mimir, Cortex and Loki; Thanos has
    `THANOS-TENANT`."""

    def __post_init__(self) -> None:
        """Refuse what names no tenant; raises ValueError naming the field."""
        if not self.of_namespace:
            if self.shared:
                raise ValueError("shared: one tenant for all is a header: give it in headers")
            return
        refuse_unusable_template(self.of_namespace)
        if not is_tenant(self.shared):
            raise ValueError(
                "shared: devices and nodes are of no namespace: name their tenant, of letters,"
                " digits and !-_.*'()"
            )


def refuse_unusable_template(template: str) -> None:
    """Raise ValueError for a template of tenants that could not be filled in."""
    if "namespace" not in _fields_in("of_namespace", template, {"cluster", "namespace"}):
        raise ValueError(
            "of_namespace: without {namespace} all goes to one tenant: give that in headers"
        )
    if not is_tenant(template.format(namespace="x", cluster="x")):
        raise ValueError("of_namespace: a tenant has letters, digits and !-_.*'() alone")


def _fields_in(setting: str, template: str, known: Collection[str]) -> set[str]:
    """Return what is filled in; raises ValueError for what is not known, or has a format."""
    try:
        parsed = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{setting}: {error}: write {{{{ and }}}} for braces") from error
    # A width of billions is a text of as many characters.
    if any(spec or conversion for _, _, spec, conversion in parsed):
        raise ValueError(f"{setting}: write a name alone between braces, as {{{max(known)}}}")
    fields = {name or "" for _, name, _, _ in parsed}
    if unknown := sorted(fields.difference(known)):
        raise ValueError(
            f"{setting}: there is no {{{unknown[0]}}}; there are"
            f" {', '.join(f'{{{name}}}' for name in sorted(known))}"
        )
    return fields


_TENANT: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!_.*'()-]{1,150}")
"""As Mimir has it (grafana.com/docs/mimir, "About tenant IDs")."""


def is_tenant(name: str) -> bool:
    """Return whether a receiver may have a tenant of that name."""
    return bool(_TENANT.fullmatch(name))


RemoteWriteProtocol = Literal["auto", "1.0", "2.0"]


class RemoteWriteSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where samples go, and how the sender shows who it is."""

    url: str = "http://localhost:9090/api/v1/write"
    """The receiver's remote-write endpoint."""
    sigv4: Sigv4Settings = Sigv4Settings()
    """How requests are signed for AWS, in place of another login."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Further headers, such as `X-Scope-OrgID`; the protocol's own cannot be overridden."""
    tenants: TenantSettings = TenantSettings()
    """Where the series of each namespace go to a tenant of their own."""
    protocol: RemoteWriteProtocol = "auto"
    """The version of remote-write: `"1.0"` or `"2.0"`, in YAML in quotes, or `auto`, which begins
    with 2.0 and goes on with 1.0 where the receiver does not speak it."""
    timeout_seconds: Seconds = 30.0
    """How long one request may take."""
    external_labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Further labels of every series, such as `replica`; `cluster` is the records' own."""
    interval_seconds: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 15.0
    """Of so much of a node's time one sample of each series is sent: gauges are its mean, with
    their maximum beside it, counters are exact. 0 sends each tick."""
    pod_labels: list[str] = msgspec.field(default_factory=list)
    """The labels of pods that stand on `gpuledger_pod_info`, as `label_…`, by their names in
    Kubernetes; podwatch must keep them as well (its `labels`)."""
    namespace_labels: list[str] = msgspec.field(default_factory=list)
    """The same of namespaces, on `gpuledger_namespace_info`."""
    node_labels: list[str] = msgspec.field(default_factory=list)
    """The same of nodes, on `gpuledger_node_description_info`."""
    dcgm_names: bool = False
    """Whether readings are sent under dcgm-exporter's names (`DCGM_FI_DEV_GPU_UTIL`, …) and labels
    as well; not where one Prometheus scrapes the nodes' pages too, which have them."""
    dcgm_host_label: Literal["hostname", "Hostname"] = "hostname"
    """The label of these that names the node: `hostname` since May 2026, `Hostname` before."""
    hw_names: bool = False
    """Whether readings are sent under the names of OpenTelemetry's hardware conventions
    (`hw_gpu_utilization_ratio`, …) as well; not where a collector sends these of the same GPUs. The
    conventions are in development: what they rename is renamed here."""
    health_interval_seconds: Seconds = 10.0
    """How often samples of the GPUs' health are sent: errors, throttling, links, incidents. Agents
    ask for it every 10 s."""
    samples_per_request: Count = 10_000
    """How many samples a request holds at most, one tick of one node apart."""
    commit_interval_seconds: Pause = 5.0
    """How often offsets and counters are committed at most, per partition. After a crash what was
    sent since is sent again; 0 commits after each poll."""
    queue_bytes: Count = 16_777_216
    """How many bytes of events may wait to be sent, as they lie in Kafka; each partition that is
    held has an equal part, and no more is read of one that has as much. Up to one poll more."""
    final_statuses: list[Literal[401, 403, 404]] = msgspec.field(default_factory=list)
    """Statuses of these three that refuse samples for good, as the protocol has it: they go to the
    dead letters. Otherwise they are waited for, as they speak of the login or the address."""
    poison_seconds: Pause = 600.0
    """A tick at which the receiver fails (5xx) for so long, while it takes others, is put aside;
    0 waits for ever."""
    max_future_seconds: Seconds = 300.0
    """Ticks further in the future are put aside: they would block their series at the receiver. So
    are those of a clock that leapt ahead less than a minute before, from 10 s on."""
    max_age_seconds: Pause = 0.0
    """Ticks older than this are put aside, as a receiver may fail at them rather than refuse them:
    give it what the receiver takes (`out_of_order_time_window`); 0 is no bound."""
    stale_after_seconds: Seconds = 60.0
    """The series of a node of which nothing has come for so long are ended."""
    max_series_bytes: Count = 134_217_728
    """How much memory the labels of the series that are alive may take: some 200 bytes a series.
    Beyond it, nodes are forgotten of which nothing has come for longest, and their series end as a
    receiver ends what it hears no more of."""
    max_series_per_namespace: dict[str, Natural] = msgspec.field(default_factory=dict)
    """How many series a namespace may have at this sink, by patterns of names, of which the first
    that matches holds: `{"ci-*": 200, "*": 5000}`. What would begin beyond it is not sent, and is
    counted. A namespace that none matches has no bound."""
    max_poll_records: Count = 500
    """The most events that one poll brings."""
    openmetrics: OpenMetricsSettings = OpenMetricsSettings()
    """What to scrape in place of Kafka, to try a receiver."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sent; raises ValueError naming the field."""
        try:
            require_http_url(self.url)
        except ValueError as error:
            raise ValueError(f"url {error}") from error
        self.refuse_unusable(url=[self.url], sigv4=self.sigv4)
        refuse_reserved(self.headers)
        self._refuse_unusable_tenants()
        refuse_unusable_labels(self.external_labels, self.aliases)
        for setting in ("pod_labels", "namespace_labels", "node_labels"):
            refuse_equal_labels(setting, getattr(self, setting), self.external_labels)

    def _refuse_unusable_tenants(self) -> None:
        header = self.tenants.header
        if not self.tenants.of_namespace:
            return
        refuse_reserved({header: ""}, setting="tenants.header")
        if header.lower() in map(str.lower, self.headers):
            raise ValueError(f"headers: {header} is what tenants.header gives: take one out")
        if self.openmetrics.url:
            raise ValueError("tenants.of_namespace: a page that is scraped is of no namespace")

    @property
    def aliases(self) -> tuple[AliasSeries, ...]:
        """What makes the series that are sent under others' names."""
        dcgm = (DcgmSeries(self.dcgm_host_label),) if self.dcgm_names else ()
        return (*dcgm, HardwareSeries()) if self.hw_names else dcgm

    @property
    def sent_labels(self) -> SentLabels:
        """The labels that stand on the info series."""
        return SentLabels(
            pods=tuple(self.pod_labels),
            namespaces=tuple(self.namespace_labels),
            nodes=tuple(self.node_labels),
        )


OWN_LABELS: Final = {"cluster", "node"}.union(
    *(family.labels for family in (*FAMILIES, COUNTERS, *HEALTH_FAMILIES, *INCIDENT_FAMILIES))
)
"""What gpuledger's series are labelled with."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LABEL_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def refuse_unusable_labels(labels: dict[str, str], aliases: Iterable[AliasSeries] = ()) -> None:
    """Raise ValueError for a label that no series can have beside its own."""
    families = [family for alias in aliases for family in alias.families]
    taken = OWN_LABELS.union(*(family.labels for family in families))
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(f"external_labels: {name!r} is no name of a Prometheus label")
        if name in taken:
            raise ValueError(f"external_labels: {name} is the series' own; take it out")
        if not value:
            raise ValueError(f"external_labels: {name} has no value: give one or take it out")


def refuse_reserved(headers: dict[str, str], *, setting: str = "headers") -> None:
    """Raise ValueError for a header that the protocol reserves or another setting gives."""
    for name, value in headers.items():
        if name.lower() in RESERVED_HEADERS:
            raise ValueError(
                f"{setting}: {name} is the sender's own; take it out (credentials have settings)"
            )
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{setting}: {name!r} is no name of an HTTP header")
        # A line break would begin another header, or end the request.
        if any(not character.isprintable() and character != "\t" for character in value):
            raise ValueError(f"{setting}: the value of {name} has a control character: take it out")


ALERT_ADDRESS_FIELDS: Final = frozenset(
    {"alertname", "category", "cluster", "gpu_uuid", "kind", "node", "severity", "xid"}
)
"""Labels of an alert that may stand in the addresses that it carries."""
_ALERT_LABELS: Final = ALERT_ADDRESS_FIELDS | {
    "container",
    "gpu_index",
    "gpu_instance",
    "namespace",
    "owner_kind",
    "owner_name",
    "pod",
}
_NO_LABEL_CHARACTER: Final = re.compile(r"[^a-zA-Z0-9_]")


def alert_label_of(prefix: str, name: str) -> str:
    """Return what a label of a Kubernetes object is called on an alert, as `label_app_kubernetes`.

    As kube-state-metrics has it: what no Prometheus label may have in its name is `_`.
    """
    return f"{prefix}_{_NO_LABEL_CHARACTER.sub('_', name)}"


def _refuse_label_of_alert(labels: dict[str, str]) -> None:
    """Raise ValueError for an external label that is an alert's own."""
    for name in labels:
        if name in _ALERT_LABELS or name.startswith(("label_", "namespace_label_")):
            raise ValueError(f"external_labels: {name} is the alerts' own; take it out")


def _refuse_equal_labels(setting: str, names: list[str]) -> None:
    """Raise ValueError for labels of objects that would be called the same on an alert."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(alert_label_of("label", name), name)
        if other != name:
            raise ValueError(f"{setting}: {other} and {name} are the same label of an alert")
        if not name:
            raise ValueError(f"{setting}: a label without a name: take it out")


_API_PATH: Final = re.compile(r"/api/v[12](?:/alerts)?/*\Z")


def _refuse_api_path(url: str) -> None:
    """Raise ValueError for an address to which the path would be given twice."""
    # As Alertmanager's own documentation shows it: it would answer 404 to each alert.
    if _API_PATH.search(urlsplit(url).path):
        shown = shown_url(url)
        raise ValueError(
            f"urls: {shown!r} ends with the path that is added to it: give the address before it,"
            f" {_API_PATH.sub('', shown)}"
        )


def _refuse_address(setting: str, template: str) -> None:
    """Raise ValueError for an address that could not be filled in."""
    _fields_in(setting, template, ALERT_ADDRESS_FIELDS)
    if template:
        try:
            require_http_url(template.format(**dict.fromkeys(ALERT_ADDRESS_FIELDS, "x")))
        except ValueError as error:
            raise ValueError(f"{setting}: {error}") from error


class BusyWithoutPodSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a GPU that works for no pod is an alert."""

    threshold_ratio: Ratio = 0.05
    """The share of the time, booked on the host or on nobody, from which on it counts."""
    for_seconds: Pause = 60.0
    """How long it must last, by the events' own time, before the alert fires."""


class AlertsSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts go, by what login to each of them, and when they fire."""

    ADDRESS: ClassVar[str] = "urls"

    urls: list[str] = msgspec.field(default_factory=lambda: ["http://localhost:9093"])
    """Every Alertmanager of the cluster, each by itself: not a load balancer before them. Without
    `/api/v2/alerts`, which is added."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Further headers, such as `X-Scope-OrgID`; the protocol's own cannot be overridden."""
    external_labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Further labels of every alert, such as `region`; `cluster` is the records' own."""
    pod_labels: list[str] = msgspec.field(default_factory=list)
    """Labels of the pod that an incident's alert names to put on it, such as `team`, which becomes
    `label_team`; podwatch has to keep them."""
    namespace_labels: list[str] = msgspec.field(default_factory=list)
    """Labels of that pod's namespace to put on it, such as `team`, which becomes
    `namespace_label_team`; podwatch has to keep them."""
    runbook_url: str = ""
    """Address of what to do, the annotation `runbook_url` of every alert, in which `{alertname}`,
    `{kind}`, `{xid}`, `{category}`, `{severity}`, `{cluster}`, `{node}` and `{gpu_uuid}` stand for
    the alert's own; empty means none."""
    generator_url: str = ""
    """Address of where an alert comes from, such as a dashboard of the GPU, in the same way."""
    timeout_seconds: Seconds = 10.0
    """How long one request may take."""
    resend_seconds: Seconds = 60.0
    """How often a firing alert is sent again; it ends by itself four times that after the last."""
    incident_hold_seconds: Seconds = 300.0
    """How long the alert of an incident stands from when the first Alertmanager takes it; that of a
    state stands so long at least."""
    incident_age_seconds: Seconds = 3600.0
    """Incidents older than this, as after a long outage, are counted and not sent."""
    stale_after_seconds: Seconds = 600.0
    """An alert of a GPU of which nothing has come for so long is no longer sent; it ends by itself
    four times `resend_seconds` after it was sent last."""
    state_stale_after_seconds: Seconds = 86_400.0
    """How long the alert of a state, such as a lost GPU, is sent while no tick names the GPU, as of
    a node that is gone."""
    busy_without_pod: BusyWithoutPodSettings = BusyWithoutPodSettings()
    """The rule `GpuBusyWithoutPod`."""
    max_poll_records: Count = 500
    """The most records that one poll brings."""

    def __post_init__(self) -> None:
        """Refuse what cannot be reached; raises ValueError naming the field."""
        if not self.urls:
            raise ValueError("urls: name at least one Alertmanager")
        for url in self.urls:
            try:
                require_http_url(url)
            except ValueError as error:
                raise ValueError(f"urls: {error}") from error
            _refuse_api_path(url)
        self.refuse_unusable(urls=self.urls)
        refuse_reserved(self.headers)
        refuse_unusable_labels(self.external_labels)
        _refuse_label_of_alert(self.external_labels)
        _refuse_equal_labels("pod_labels", self.pod_labels)
        _refuse_equal_labels("namespace_labels", self.namespace_labels)
        _refuse_address("runbook_url", self.runbook_url)
        _refuse_address("generator_url", self.generator_url)


_LONGEST_SECONDS: Final = 10_000_000_000
"""Three centuries: more than nanoseconds since 1970 go to."""


class StoreRetentionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how many days each table keeps its rows, by the days of UTC; 0 keeps all."""

    usage_days: Natural = 92
    """How long the sums by minute are kept. What they come to by hour stays."""
    usage_hourly_days: Natural = 1_096
    """How long the sums by hour are kept, three years. What they come to by day stays."""
    usage_daily_days: Natural = 0
    """How long the sums by day are kept."""
    entries_days: Natural = 31
    """How long single ticks are kept, where they are stored."""


_UNUSABLE_IN_FOLDERS: Final = frozenset("[]^|%\\")


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the rows go and how often they are written."""

    uri: Name = "/var/lib/gpuledger/store"
    """Folder or object-store URI of the store; its tables lie under it, a folder each."""
    storage_options: dict[str, str] = {}
    """Options for the object store, as deltalake names them. Credentials come from the environment,
    the machine's role, or files: `aws_secret_access_key_file` names one with the value of
    `aws_secret_access_key`, and so for each option."""
    entries: bool = False
    """Whether each tick is stored by itself too, a row for each of its entries in the table
    `entries`: some 330 million rows and 26 GB a day for a thousand GPUs."""
    flush_seconds: Pause = 30.0
    """How long rows wait at most before they are written."""
    flush_rows: Count = 100_000
    """How many rows are written at the latest."""
    flush_bytes: Count = 268_435_456
    """How many bytes the rows take in memory when they are written at the latest, about: the bound
    on memory. One event may be beyond it, by a few hundred megabytes where somebody makes it so."""
    max_age_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_SECONDS)] = 2_678_400.0
    """How far back the days of rows go: 31 days, a day more than a node's disk may keep ticks. An
    event of an earlier day is put aside. Where older events are to be stored, as of a topic that is
    kept for longer, raise it for as long as that takes."""
    max_future_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_SECONDS)] = 86_400.0
    """How far ahead of this machine's clock the days of rows go; an event of a later day is put
    aside."""
    generation: str = ""
    """Part of the name under which offsets are kept; give a new one after a topic was made anew."""
    maintenance_interval_seconds: Pause = 86_400.0
    """How often orphan files are looked for, first at the start; 0 is never."""
    rollup_interval_seconds: Pause = 600.0
    """How often hours and days are summed up, old rows removed and small files merged, by one sink
    at a time; 0 is never: then `gpuledger store maintain` does it."""
    retention: StoreRetentionSettings = StoreRetentionSettings()
    """How long rows are kept."""
    orphan_age_hours: Count = 168
    """How old a file must be that no commit names before it is removed. Much longer than a write
    may take, or what another sink is about to commit would go; readers of old versions of the
    table (time travel) find what a compaction replaced for as long."""
    max_poll_records: Count = 500
    """The most events that one poll brings."""

    def __post_init__(self) -> None:
        """Refuse a folder's name that deltalake 1.6 reads as another one, or fails on."""
        wrong = sorted(set(self.uri) & _UNUSABLE_IN_FOLDERS)
        if wrong and "://" not in self.uri:
            raise ValueError(f"`uri`: a store's folder may not have {' '.join(wrong)} in its name")


_OWN_ROWS: Final = Topics().rows.name


class RowsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the flat rows go."""

    topic: Name = _OWN_ROWS
    """The topic to write to; a node's rows lie in the partition of its events, modulo its own. The
    default means the installation's own topic, whatever `kafka.topic_prefix` says."""
    commit_interval_seconds: Pause = 0.1
    """How long more is waited for after a transaction, unless a poll was full: each transaction
    costs something, however little is in it."""
    max_future_seconds: Seconds = 300.0
    """Ticks further in the future are put aside: an engine that goes by event time would take all
    that comes after them for late."""
    max_poll_records: Count = 500
    """The most events that one poll brings, and so the bound on a transaction."""

    def in_installation(self, topics: Topics) -> "RowsSettings":
        """Return the settings with the topic of this installation, where it is its own."""
        if self.topic != _OWN_ROWS:
            return self
        return msgspec.structs.replace(self, topic=topics.rows.name)


Encoding = Literal["otlp_proto", "otlp_json"]


class OtlpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the metrics go, and how they are written."""

    topic: Name = "otlp_metrics"
    """The topic to write to; the default is the one that the collector's Kafka receiver reads. It
    is none of gpuledger's own: make it with Kafka's tools."""
    encoding: Encoding = "otlp_proto"
    """`otlp_proto` or `otlp_json`, as the receiver's own setting calls it."""
    resource_attributes: dict[str, str] = {}
    """Further attributes of every resource, such as `deployment.environment.name`."""
    hw_names: bool = False
    """Whether readings are written under the names of OpenTelemetry's hardware conventions
    (`hw.gpu.utilization`, …) as well; not where a collector reads these of the same GPUs. The
    conventions are in development: what they rename is renamed here."""
    commit_interval_seconds: Pause = 0.1
    """How long more is waited for after a transaction, unless a poll was full: each transaction
    costs something, however little is in it."""
    max_future_seconds: Seconds = 300.0
    """Ticks further in the future are put aside: they would block their series at a receiver."""
    max_poll_records: Count = 200
    """The most events that one poll brings, and so the bound on a transaction."""

    def __post_init__(self) -> None:
        """Refuse an attribute that would come twice; raises ValueError naming it."""
        taken = sorted(OF_RESOURCES & self.resource_attributes.keys())
        if taken:
            raise ValueError(f"resource_attributes: {taken[0]} is the sink's own; take it out")


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a sink can be told; sections of other kinds are checked and not used."""

    kind: str = ""
    """What to be: `remote_write`, `alerts`, `store`, `rows` or `otlp`."""
    group: str = ""
    """The consumer group; empty means the kind's own, such as `gpuledger-remote-write`. Sinks that
    share one share its events; a second receiver needs a sink with a group of its own. Of `store`
    the table says what is stored, whatever the group."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-sink")
    """How to reach the brokers."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9823")  # a pod's probes come from outside
    """Where health and metrics are served."""
    log: LogSettings = LogSettings()
    """What is written to standard error."""
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    """Where samples go."""
    alerts: AlertsSettings = AlertsSettings()
    """Where alerts go, and when they fire."""
    store: StoreSettings = StoreSettings()
    """Where rows go."""
    rows: RowsSettings = RowsSettings()
    """Where flat rows for SQL engines go."""
    otlp: OtlpSettings = OtlpSettings()
    """Where metrics for OpenTelemetry's collector go."""

    def __post_init__(self) -> None:
        """Refuse a kind that there is not; raises ValueError with the nearest right one.

        And what names no group, or goes with another kind alone.
        """
        if self.group:
            require_group_name("group", self.group)
        if self.kind in KINDS:
            if self.remote_write.openmetrics.url and self.kind != REMOTE_WRITE.name:
                raise ValueError(
                    f"remote_write.openmetrics.url: only {REMOTE_WRITE.name} takes it, {self.kind}"
                    f" reads Kafka alone: take it out, or run gpuledger-sink {REMOTE_WRITE.name}"
                )
            return
        if not self.kind:
            raise ValueError(f"kind: say which sink to run: gpuledger-sink {'|'.join(KINDS)}")
        nearest = find_near(self.kind, KINDS, cutoff=0.0)  # there always is one
        raise ValueError(f"kind: there is no sink {self.kind!r}; did you mean {nearest!r}?")
