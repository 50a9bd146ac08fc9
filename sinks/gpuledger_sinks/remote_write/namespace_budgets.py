"""How many series a namespace may have at this sink: a bound by rules, over all its partitions.

A series counts for the namespace of its pod, or of who holds what is idle. What begins of a pod
while its namespace has no room for all of it is left out, so that no pod is sent in part, and asks
again with each tick; what has begun goes on.
So a team that starts pods without end costs the receiver what its rule says, and no other team
anything. Pure; who is left out is counted here and told elsewhere.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple

from gpuledger.ledger.families import Family
from gpuledger.ledger.series import SeriesGroup

Namespace = tuple[str, str]
"""A namespace: its cluster, and its name in it."""


class OverBudget(NamedTuple):
    """Of whom samples were left out, and by which rule."""

    rule: str
    """The pattern."""
    cluster: str
    namespace: str


_LABELS: Final = ("namespace", "holder_namespace")
_UID_LABELS: Final = ("pod_uid", "holder_uid")


def namespace_of(cluster: str, group: SeriesGroup) -> Namespace | None:
    """Return the namespace for which a group counts; `None` where that is nobody's."""
    # A device under others' names is no more series for having a holder.
    name = "" if group.family.is_alias else namespace_in(group)
    return (cluster, name) if name else None


def namespace_in(group: SeriesGroup) -> str:
    """Return the namespace in a group's labels; empty where there is none."""
    return _value_of(group, _LABELS)


def _value_of(group: SeriesGroup, labels: tuple[str, ...]) -> str:
    position = _position_of(group.family, labels)
    return "" if position is None else group.label_values[position]


@lru_cache(maxsize=512)
def _position_of(family: Family, labels: tuple[str, ...]) -> int | None:
    return next((family.labels.index(name) for name in labels if name in family.labels), None)


def _by_pod(
    cluster: str, groups: Iterable[SeriesGroup]
) -> Mapping[tuple[Namespace, str], list[SeriesGroup]]:
    """Return the groups that count for a namespace, by that and the pod's UID."""
    found: defaultdict[tuple[Namespace, str], list[SeriesGroup]] = defaultdict(list)
    for group in groups:
        if (namespace := namespace_of(cluster, group)) is not None:
            found[namespace, _value_of(group, _UID_LABELS)].append(group)
    return found


class NamespaceBudgets:
    """What the namespaces have of what they may, in all partitions together.

    The rules are patterns of names, of which the first that matches holds.
    """

    def __init__(self, rules: Mapping[str, int] | None = None) -> None:
        self._rules = tuple((rules or {}).items())
        self._series: Counter[Namespace] = Counter()
        self._rule_of = lru_cache(maxsize=4096)(self._first_match)

    @property
    def are_bounds(self) -> bool:
        """Whether there is a rule at all."""
        return bool(self._rules)

    def has_rule(self, namespace: Namespace) -> bool:
        """Return whether there is a bound for the namespace."""
        return self._rule_of(namespace[1]) is not None

    def refusal_of(self, namespace: Namespace, series: int) -> str | None:
        """Return the rule by which the namespace may not have so many more; `None` if it may."""
        rule = self._rule_of(namespace[1])
        if rule is None or self._series[namespace] + series <= rule[1]:
            return None
        return rule[0]

    def change(self, by: Mapping[Namespace, int]) -> None:
        """Count series that have begun, and with negative numbers those that have ended."""
        for namespace, series in by.items():
            self._series[namespace] += series
            if self._series[namespace] <= 0:
                del self._series[namespace]

    def _first_match(self, name: str) -> tuple[str, int] | None:
        return next((rule for rule in self._rules if fnmatchcase(name, rule[0])), None)


class PartitionNamespaces:
    """What the namespaces have in one partition, as a part of the budgets of all."""

    def __init__(self, budgets: NamespaceBudgets) -> None:
        self._budgets = budgets
        self._series: Counter[Namespace] = Counter()
        self._left_out: Counter[OverBudget] = Counter()

    @property
    def are_bounded(self) -> bool:
        """Whether there is a rule at all."""
        return self._budgets.are_bounds

    def leave_out(
        self,
        cluster: str,
        begun: Mapping[SeriesGroup, int],
        *,
        active: Iterable[SeriesGroup] = (),
        is_counted: bool = True,
    ) -> set[SeriesGroup]:
        """Return those groups for which there is no room, and count them as left out.

        A pod of which something is `active` on the node has room for all else of it.
        `begun` says of how many series each group is. All that begins of a pod is left out, or
        nothing. Where it `is_counted`, what has room is counted as begun.
        """
        found: set[SeriesGroup] = set()
        by_pod = _by_pod(cluster, begun)
        known = _by_pod(cluster, active) if by_pod else {}
        for pod, groups in by_pod.items():
            namespace, uid = pod
            series = sum(begun[group] for group in groups)
            has_begun = bool(uid) and pod in known
            rule = None if has_begun else self._budgets.refusal_of(namespace, series)
            if rule is not None:
                self._left_out[OverBudget(rule, *namespace)] += series
                found.update(groups)
            elif is_counted and self._budgets.has_rule(namespace):
                self._change({namespace: series})
        return found

    def end(self, namespace: Namespace | None, series: int) -> None:
        """Count series that have ended."""
        if namespace is not None and self._budgets.has_rule(namespace):
            self._change({namespace: -series})

    def recount(self, alive: Iterable[tuple[Namespace | None, int]]) -> None:
        """Count what is alive anew, as after nodes were forgotten."""
        counted: Counter[Namespace] = Counter()
        for namespace, series in alive:
            if namespace is not None and self._budgets.has_rule(namespace):
                counted[namespace] += series
        difference = Counter(counted)
        difference.subtract(self._series)
        self._budgets.change(difference)
        self._series = counted

    def take_left_out(self) -> Counter[OverBudget]:
        """Return how many samples of whom were left out since this was asked last."""
        taken, self._left_out = self._left_out, Counter()
        return taken

    def _change(self, by: Mapping[Namespace, int]) -> None:
        self._budgets.change(by)
        for namespace, series in by.items():
            self._series[namespace] += series
            if not self._series[namespace]:
                del self._series[namespace]
