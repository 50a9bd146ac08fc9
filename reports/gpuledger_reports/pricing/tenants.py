"""Finds the tenant of a row of usage, and the tenant's names for a bill: owner, labels, team.

Pure. A pod is identified by cluster, node and UID, so that a node can report only its own pods. An
allocatee without a UID is the pod on the node that had the namespace and name in the row's hour.
Pods are looked up when the bill is made, so names that arrived late are also found.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from gpuledger.keys import NAME_LINGER_SECONDS, NAME_SKEW_SECONDS
from gpuledger.ledger.series import label_of
from gpuledger_reports.pricing.policy import BillPolicy, TeamRow, fits_pattern
from gpuledger_reports.pricing.rates import DeviceTraits
from gpuledger_reports.reading.inventory import NEVER_US
from gpuledger_reports.reading.parties import PartyKey, PartyKind, PodVersion
from gpuledger_reports.reading.times import HOUR_US
from gpuledger_reports.reading.versions import NamespaceVersion, effective_versions, version_at

UNALLOCATED: Final = "__unallocated__"
"""The value of a dimension that is missing, for example of a pod without the label."""
UNATTRIBUTED: Final = "__unattributed__"
"""The tenant of use by processes whose owner is unknown."""
ABSENT: Final = frozenset({UNALLOCATED, UNATTRIBUTED})
"""Special values that mean that a value is missing."""
HOST: Final = "__host__"
UNRESPONSIVE: Final = "__unresponsive__"
IDLE: Final = "__idle__"
UNUSED: Final = "__unused__"
NO_DATA: Final = "__no_data__"
UNKNOWN: Final = "__unknown__"
"""The value for time that may be allocated, but the kubelet did not answer to whom."""
SHARED: Final = "__shared__"
"""The value of a tenant whose cost is distributed to others by `share: table`."""
_SKEW_US: Final = NAME_SKEW_SECONDS * 10**6
_LINGER_US: Final = NAME_LINGER_SECONDS * 10**6


class Tenant(NamedTuple):
    """The tenant of a row, with all known facts about its pod."""

    identity: tuple[str, ...]
    """Equal for all rows of one tenant, whether they are used or allocated time."""
    kind: PartyKind
    namespace: str | None = None
    pod: str | None = None
    owner_kind: str | None = None
    owner_name: str | None = None
    job: str | None = None
    labels: str | None = None
    cluster: str | None = None
    annotations: str | None = None


class TenantBook:
    """The versions of all pods and namespaces that a bill may name."""

    def __init__(
        self,
        *,
        pods: Iterable[PodVersion],
        namespaces: Mapping[tuple[str, str], Sequence[NamespaceVersion]],
        policy: BillPolicy,
    ) -> None:
        self._policy = policy
        self._histories: dict[tuple[str, str, str], list[PodVersion]] = defaultdict(list)
        for version in sorted(set(pods), key=_order_of):
            self._histories[version.cluster, version.node, version.uid].append(version)
            if version.config_hash:
                key = (version.cluster, version.node, version.config_hash)
                self._histories[key].append(version)
        # Several pods may have the same name one after another, for example in a StatefulSet.
        self._named: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)
        for cluster, node, uid in self._histories:
            for version in self._histories[cluster, node, uid]:
                name = (cluster, node, version.namespace, version.pod)
                self._named[name].add(version.uid)
        self._namespaces = {
            name: effective_versions(versions) for name, versions in namespaces.items()
        }

    def find(self, key: PartyKey, since_us: int) -> Tenant:
        """Return the tenant of a row that begins at `since_us` and lasts at most an hour."""
        node = (key.cluster, key.node)
        if key.kind == "job":
            return Tenant(("job", key.cluster, key.job or ""), "job", job=key.job)
        # The host and unattributed work belong to their node, not to a tenant.
        if key.kind != "pod":
            return Tenant((key.kind, *node), key.kind)
        if key.is_named_by_row:
            named = ("named", key.cluster, key.namespace or "", key.pod or "")
            return Tenant(named, "pod", key.namespace, key.pod, cluster=key.cluster)
        uid = key.uid or self._bearer_of(key, since_us)
        if uid is None:
            # The row has no UID, and no pod record has the row's name.
            identity = ("name", *node, key.namespace or "", key.pod or "")
            return Tenant(identity, "pod", key.namespace, key.pod, cluster=key.cluster)
        history = self._histories.get((*node, uid))
        # The pod has no record, so its name comes from the row.
        if not history:
            return Tenant(("pod", *node, uid), "pod", key.namespace, key.pod, cluster=key.cluster)
        current = _in_force(history, since_us)
        return Tenant(
            identity=("pod", *node, current.uid),
            kind="pod",
            namespace=current.namespace,
            pod=current.pod,
            owner_kind=current.owner_kind,
            owner_name=current.owner_name,
            labels=current.labels,
            cluster=key.cluster,
            annotations=current.annotations,
        )

    def has_pod(self, cluster: str, node: str, uid: str) -> bool:
        """Return whether a pod has a record."""
        return (cluster, node, uid) in self._histories

    def is_other_pod(self, cluster: str, node: str, uid: str, namespace: str, pod: str) -> bool:
        """Return whether a name belongs to another pod than the one with this UID.

        If the pod with this UID has no record, the name counts as another pod's if any pod had it.
        """
        history = self._histories.get((cluster, node, uid))
        if history:
            return (history[-1].namespace, history[-1].pod) != (namespace, pod)
        return (cluster, node, namespace, pod) in self._named

    def changes(self, *, with_namespaces: bool) -> Iterator[tuple[int, str, str | None]]:
        """Yield the time, cluster and node of each change of a pod's or a namespace's facts.

        The node is `None` if a namespace changed, because it may have pods on any node.
        """
        for history in self._histories.values():
            for before, after in pairwise(history):
                if before.described != after.described:
                    yield after.since_us, after.cluster, after.node
        for (cluster, _), versions in self._namespaces.items() if with_namespaces else ():
            for earlier, later in pairwise(versions):
                if earlier[2:] != later[2:]:
                    yield later.since_us, cluster, None

    def namespace_of(self, tenant: Tenant, since_us: int) -> NamespaceVersion | None:
        """Return the version of a tenant's namespace at a time, or `None` if unknown."""
        versions = self._namespaces.get((tenant.cluster or "", tenant.namespace or ""))
        return version_at(versions, since_us) if versions else None

    def _bearer_of(self, key: PartyKey, since_us: int) -> str | None:
        """Return the UID of the newest pod that had the key's name on the node in this hour.

        The hour begins at `since_us`. Returns `None` if there was no such pod.
        """
        named = (key.cluster, key.node, key.namespace or "", key.pod or "")
        there, soon = [], []
        for uid in self._named.get(named, ()):
            history = self._histories[key.cluster, key.node, uid]
            deleted = max((v.deleted_us for v in history if v.deleted_us), default=NEVER_US)
            created = history[-1].created_us
            if since_us >= deleted + _LINGER_US:
                continue
            if created < since_us + HOUR_US:
                there.append((created, uid))
            elif created < since_us + HOUR_US + _SKEW_US:
                soon.append((created, uid))
        # The newest pod that existed; otherwise the first one created within the clock skew.
        return max(there)[1] if there else min(soon)[1] if soon else None


def _order_of(version: PodVersion) -> tuple[int, int]:
    # Versions have Kubernetes' own order if they are numbers, otherwise the order of the topic.
    number = version.resource_version
    return (int(number) if number.isdecimal() else 0, version.kafka_offset)


def _in_force(history: Sequence[PodVersion], since_us: int) -> PodVersion:
    """Return the version in force at a time; before the first version, the first one."""
    found = history[0]
    for version in history:
        if version.since_us <= since_us:
            found = version
    return found


@lru_cache(maxsize=65_536)
def _decoded(text: str | None) -> Mapping[str, str]:
    """Return labels from JSON; empty if the text is not a JSON object of strings."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, str])
    except msgspec.MsgspecError:
        return {}


@lru_cache(maxsize=65_536)
def _by_prometheus_name(text: str | None) -> Mapping[str, str]:
    """Return labels from JSON, with the names that they have as labels of Prometheus series."""
    return {label_of(key): value for key, value in _decoded(text).items()}


def parts_of(names: Sequence[str], policy: BillPolicy) -> frozenset[str]:
    """Return the built-in dimensions that the dimensions `names` use.

    Custom dimensions are replaced by their definition; `team` also uses the dimensions of teams.
    """
    tried = {part for name in names for part in policy.dimensions.get(name, [name])}
    if "team" in names:
        of_rows = {part for row in policy.teams for part in row.match}
        tried |= {part for name in of_rows for part in policy.dimensions.get(name, [name])}
    return frozenset(tried)


class Dimensions:
    """The dimensions of a bill; finds their values for a device and a tenant."""

    def __init__(self, names: Sequence[str], *, policy: BillPolicy, book: TenantBook) -> None:
        self.names = tuple(names)
        self._policy = policy
        self._book = book

    @property
    def parts(self) -> frozenset[str]:
        """All built-in dimensions that these dimensions use."""
        return parts_of(self.names, self._policy)

    def is_of_device(self, name: str) -> bool:
        """Return whether a dimension describes the GPU, not its user."""
        return self._policy.is_of_device(name)

    def of_tenant(
        self, tenant: Tenant, facts: DeviceTraits, *, since_us: int, day: date
    ) -> tuple[str, ...]:
        """Return the values of a tenant's line."""
        namespace_version = self._book.namespace_of(tenant, since_us)
        # For the host and for unattributed use, missing values are replaced by the kind of the row.
        word = {"host": HOST, "unattributed": UNATTRIBUTED}.get(tenant.kind, UNALLOCATED)
        finder = ValueFinder(tenant, facts, namespace_version, day, self._policy)
        return tuple(finder.value(name) or self._word(name, word) for name in self.names)

    def of_idle(self, word: str, facts: DeviceTraits, *, day: date) -> tuple[str, ...]:
        """Return the values of an idle line; dimensions of tenants have `word` as their value."""
        finder = ValueFinder(None, facts, None, day, self._policy)
        return tuple(finder.value(name) or self._word(name, word) for name in self.names)

    def _word(self, name: str, word: str) -> str:
        return UNALLOCATED if self.is_of_device(name) else word


class ValueFinder(NamedTuple):
    """Finds the values of dimensions for one tenant on one device."""

    tenant: Tenant | None
    facts: DeviceTraits
    namespace: NamespaceVersion | None
    day: date
    policy: BillPolicy

    def value(self, name: str) -> str | None:
        """Return a dimension's value, or `None`; for a custom one, the first value that exists."""
        if name == "team" and (found := self._team()) is not None:
            return found
        tried = self.policy.dimensions.get(name, () if name == "team" else (name,))
        return next((value for part in tried if (value := self._plain(part))), None)

    def _team(self) -> str | None:
        if self.tenant is None:
            return None
        rows = (row for row in self.policy.teams if row.holds_on(self.day))
        return next((row.team for row in rows if self._fits(row)), None)

    def _fits(self, row: TeamRow) -> bool:
        return all(
            fits_pattern(self.value(dimension) or "", pattern)
            for dimension, pattern in row.match.items()
        )

    def _plain(self, name: str) -> str | None:
        prefix, colon, key = name.partition(":")
        if colon:
            by_prefix: Mapping[str, str | None] = {
                "label": self.tenant.labels if self.tenant else None,
                "annotation": self.tenant.annotations if self.tenant else None,
                "node-label": self.facts.labels,
                "namespace-label": self.namespace.labels if self.namespace else None,
                "namespace-annotation": self.namespace.annotations if self.namespace else None,
            }
            labels = by_prefix[prefix]
            found = _decoded(labels).get(key)
            # Names that Prometheus has changed contain an underscore.
            return found or (_by_prometheus_name(labels).get(label_of(key)) if "_" in key else None)
        if name in self.facts._fields:
            value: str | None = getattr(self.facts, name)
            return value
        if self.tenant is None:
            return None
        if name == "owner":
            kind, owner = self.tenant.owner_kind, self.tenant.owner_name
            return f"{kind}/{owner}" if kind and owner else None
        fact: str | None = getattr(self.tenant, name)
        return fact


def fits_all(match: Mapping[str, str], names: Sequence[str], values: Sequence[str]) -> bool:
    """Return whether the values match all patterns; `names` are the values' dimensions."""
    found = dict(zip(names, values, strict=True))
    return all(fits_pattern(found[name], pattern) for name, pattern in match.items())
