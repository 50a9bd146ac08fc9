"""The settings of `gpuledger sink`: what all kinds have, and a section for each kind."""

import re
from collections.abc import Collection
from string import Formatter
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.series import SentLabels, refuse_equal_labels
from gpuledger.ledger.usage import COUNTERS
from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import require_group_name, require_http_url
from gpuledger.settings.secret import shown_url
from gpuledger.texts import find_near
from gpuledger.topics import Topics
from gpuledger_sinks.receiver_settings import ReceiverSettings, Sigv4Settings
from gpuledger_sinks.registry import KINDS

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


RemoteWriteProtocol = Literal["auto", "1.0", "2.0"]


class RemoteWriteSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where samples go, and how the sender shows who it is."""

    url: str = "http://localhost:9090/api/v1/write"
    """The receiver's remote-write endpoint."""
    sigv4: Sigv4Settings = Sigv4Settings()
    """How requests are signed for AWS, in place of another login."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Further headers, such as `X-Scope-OrgID`; the protocol's own cannot be overridden."""
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
    max_series_per_node: Natural = 10_000
    """Maximum number of series of pods and jobs on a node. Pods and jobs that begin above it are
    counted and not sent. 0 disables the limit."""
    max_poll_records: Count = 500
    """The most events that one poll brings."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sent; raises ValueError naming the field."""
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


def refuse_unusable_labels(labels: dict[str, str]) -> None:
    """Raise ValueError for a label that no series can have beside its own."""
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(f"external_labels: {name!r} is no name of a Prometheus label")
        if name in OWN_LABELS:
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


class AlertsSettings(ReceiverSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts go, and for how long they stand."""

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
    state_stale_after_seconds: Seconds = 86_400.0
    """How long the alert of a state, such as a lost GPU, is sent while no tick names the GPU, as of
    a node that is gone."""
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
        refuse_reserved(dict.fromkeys(self.header_files, ""), setting="header_files")
        refuse_unusable_labels(self.external_labels)
        _refuse_label_of_alert(self.external_labels)
        _refuse_equal_labels("pod_labels", self.pod_labels)
        _refuse_equal_labels("namespace_labels", self.namespace_labels)
        _refuse_address("runbook_url", self.runbook_url)
        _refuse_address("generator_url", self.generator_url)


_LONGEST_SECONDS: Final = 10_000_000_000
"""Three centuries: more than nanoseconds since 1970 go to."""


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


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a sink can be told; sections of other kinds are checked and not used."""

    kind: str = ""
    """What to be: `remote_write`, `alerts`, `store` or `rows`."""
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
    """Where alerts go."""
    store: StoreSettings = StoreSettings()
    """Where rows go."""
    rows: RowsSettings = RowsSettings()
    """Where flat rows for SQL engines go."""

    def __post_init__(self) -> None:
        """Refuse a kind that there is not; raises ValueError with the nearest right one.

        And what names no group, or goes with another kind alone.
        """
        if self.group:
            require_group_name(self.group)
        if self.kind in KINDS:
            return
        if not self.kind:
            raise ValueError(f"kind: say which sink to run: gpuledger sink {'|'.join(KINDS)}")
        nearest = find_near(self.kind, KINDS, cutoff=0.0)  # there always is one
        raise ValueError(f"kind: there is no sink {self.kind!r}; did you mean {nearest!r}?")
