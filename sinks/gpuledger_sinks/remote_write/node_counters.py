"""The counters of one node: the use by its containers and devices since each series began.

`gpuledger.ledger.usage` defines a tick's contribution. This module defines how long a series lasts,
and how use is counted while the names of its container are unknown. Such use waits for up to a
minute of the node's time (`WAITS_NS`) and is then counted with the labels known so far. No use is
lost; the counters are only behind by the amounts that wait.

A series begins with 0 at the beginning of its first use, and keeps its value for `KEPT_NS` after
its last use, so that a container that comes back continues its counter. After a longer pause the
counter restarts, which readers see as a reset.

Pure. `record_of` and `restore` convert a node's counters to and from the record of the state topic.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Generic, TypeVar

from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS
from gpuledger.keys import split_key
from gpuledger.ledger.series import SeriesGroup
from gpuledger.ledger.usage import (
    COUNTED,
    CountedLabels,
    Unnamed,
    Used,
    UsedAmounts,
    add_amounts,
)
from gpuledger.records import (
    Category,
    CountedBoot,
    CountedPod,
    CountedSeries,
    NodeCounters,
    WaitingUse,
)
from gpuledger.records.counters import MAX_COUNTED_SERIES

K = TypeVar("K")
T = TypeVar("T")

WAITS_NS: Final = NS_PER_MINUTE
"""How long use waits for the names of its container, by the node's time."""
KEPT_NS: Final = 10 * NS_PER_MINUTE
"""How long a series lasts without further use."""


_NO_POD: Final = CountedPod()
_NOT_BEGUN: Final = (None,) * len(COUNTED)


def _nothing() -> UsedAmounts:
    return [None] * len(COUNTED)


@dataclass(slots=True)
class CountedUse:
    """The counters that share one set of labels."""

    group: SeriesGroup
    """The series with these labels."""
    seen_ns: int
    """The node's time of the last use."""
    amounts: UsedAmounts = field(default_factory=_nothing)
    """The counters, in the order of `COUNTED`."""
    begun_ns: tuple[int | None, ...] = _NOT_BEGUN
    """The time at which each counter began with 0; `None` if it has not begun."""

    starts_ms: tuple[int | None, ...] = field(init=False)
    """`begun_ns` in milliseconds as sent; the same object until another counter begins."""

    def __post_init__(self) -> None:
        """Compute `starts_ms`."""
        self.starts_ms = _as_starts(self.begun_ns)

    def add(self, amounts: UsedAmounts, *, begun_ns: int) -> list[int]:
        """Add amounts; return the positions of the counters that begin."""
        begun: list[int] = []
        # One pass for speed, because a tick has about thirty of these calls.
        totals = self.amounts
        for index, amount in enumerate(amounts):
            if amount is not None:
                if (total := totals[index]) is None:
                    begun.append(index)
                    total = 0
                totals[index] = total + amount
        if begun:
            self.begun_ns = _begin(self.begun_ns, tuple(begun), begun_ns)
            self.starts_ms = _as_starts(self.begun_ns)
        return begun


# Counters that begin in one tick have equal tuples, which most series share.
@lru_cache(maxsize=1024)
def _begin(
    before_ns: tuple[int | None, ...], begun: tuple[int, ...], begun_ns: int
) -> tuple[int | None, ...]:
    return tuple(begun_ns if at in begun else before for at, before in enumerate(before_ns))


@lru_cache(maxsize=1024)
def _as_starts(begun_ns: tuple[int | None, ...]) -> tuple[int | None, ...]:
    # A millisecond is added, so that the start is after the end of the previous tick, at which a
    # series may have ended.
    return tuple(None if at_ns is None else at_ns // NS_PER_MS + 1 for at_ns in begun_ns)


@dataclass(slots=True)
class _UseWithoutNames:
    """Use of a device by a container; it is not counted in any series yet."""

    labels: CountedLabels
    """The labels of the container that are known so far."""
    begun_ns: int
    seen_ns: int
    amounts: UsedAmounts = field(default_factory=_nothing)


class UseOfNode:
    """All series of one node, and the use that waits for names."""

    def __init__(self) -> None:
        self.series: dict[CountedLabels, CountedUse] = {}
        self._begun: dict[CountedLabels, set[int]] = {}
        self._waiting: dict[Unnamed, _UseWithoutNames] = {}
        self.ended_early = 0
        """Number of series that ended early because there were too many."""

    @property
    def has_waiting(self) -> bool:
        """Whether any use waits for names."""
        return bool(self._waiting)

    def add(self, used: Used, *, begun_ns: int, time_ns: int) -> None:
        """Add the use of one entry from one or more ticks.

        The first tick begins at `begun_ns`; `time_ns` is the node's current time.
        """
        labels, unnamed = used.user.labels, used.user.unnamed
        if unnamed is None:
            self._count(labels, used.amounts, begun_ns=begun_ns, time_ns=time_ns)
            return
        waiting = self._waiting.get(unnamed)
        if waiting is None:
            waiting = self._waiting[unnamed] = _UseWithoutNames(labels, begun_ns, time_ns)
        waiting.labels, waiting.seen_ns = labels, time_ns
        add_amounts(waiting.amounts, used.amounts)

    def name(self, named: Mapping[str, CountedLabels]) -> None:
        """Count the use that waited for these names; its series begin when the use began."""
        for unnamed in [unnamed for unnamed in self._waiting if unnamed.ident in named]:
            waiting = self._waiting.pop(unnamed)
            labels = named[unnamed.ident]._replace(gpu_uuid=unnamed.gpu_uuid)
            self._count_waiting(labels, waiting)

    def go_on(self, time_ns: int) -> None:
        """Advance to this node time: count use that waited long enough, and end old series."""
        for unnamed, waiting in list(self._waiting.items()):
            # `abs`, because the clock may have been set back: use with a time far ahead is over as
            # well.
            if abs(time_ns - waiting.begun_ns) >= WAITS_NS:
                self._count_waiting(waiting.labels, waiting)
                waiting.amounts = _nothing()
            if abs(time_ns - waiting.seen_ns) >= KEPT_NS:
                del self._waiting[unnamed]
        over = [
            labels for labels, use in self.series.items() if abs(time_ns - use.seen_ns) >= KEPT_NS
        ]
        for labels in over:
            del self.series[labels]
        self._bound()

    def forget(self, number: int) -> None:
        """End `number` series, beginning with the series whose last use is oldest."""
        for labels in sorted(self.series, key=lambda of: self.series[of].seen_ns)[:number]:
            del self.series[labels]
            self.ended_early += 1

    def stop_waiting(self) -> None:
        """Count the use that waits for pod labels now, with the labels known so far."""
        for waiting in self._waiting.values():
            self._count_waiting(waiting.labels, waiting)
        self._waiting.clear()
        self._bound()

    def take_begun(self) -> Mapping[CountedLabels, Collection[int]]:
        """Return the counters that began since the last call, by series.

        A counter is given by its position in `COUNTED`.
        """
        begun, self._begun = self._begun, {}
        return {labels: which for labels, which in begun.items() if labels in self.series}

    def _count_waiting(self, labels: CountedLabels, waiting: _UseWithoutNames) -> None:
        if any(amount is not None for amount in waiting.amounts):
            self._count(labels, waiting.amounts, begun_ns=waiting.begun_ns, time_ns=waiting.seen_ns)

    def _count(
        self, labels: CountedLabels, amounts: UsedAmounts, *, begun_ns: int, time_ns: int
    ) -> None:
        use = self.series.get(labels)
        if use is None:
            use = self.series[labels] = CountedUse(labels.group, time_ns)
        use.seen_ns = time_ns
        if begun := use.add(amounts, begun_ns=begun_ns):
            self._begun.setdefault(labels, set()).update(begun)

    def _bound(self) -> None:
        """Limit waiting use and series: count the oldest waiting use, and end the oldest series."""
        if (excess := len(self._waiting) - MAX_COUNTED_SERIES) > 0:
            # The first ones have waited longest.
            for unnamed in list(self._waiting)[:excess]:
                waiting = self._waiting.pop(unnamed)
                self._count_waiting(waiting.labels, waiting)
        if (excess := len(self.series) - MAX_COUNTED_SERIES) > 0:
            self.forget(excess)

    def record_of(
        self, *, group: str, node: str, time_ns: int, boots: Mapping[str, int]
    ) -> NodeCounters:
        """Return the record for the state topic; `node` is the node's key."""
        gpus, pods = _Positions[str](), _Positions[CountedPod]()
        series = [
            CountedSeries(
                gpu=gpus.of(labels.gpu_uuid),
                category=labels.category,
                pod=pods.of(_pod_of(labels)) if labels.category == Category.POD else None,
                container=labels.container or None,
                seen_time_ns=use.seen_ns,
                amounts=_as_texts(use.amounts),
                begun_time_ns=[*use.begun_ns],
                job_id=labels.job_id or None,
            )
            for labels, use in self.series.items()
        ]
        waiting = [
            WaitingUse(
                gpu=gpus.of(unnamed.gpu_uuid),
                ident=unnamed.ident,
                since_time_ns=waiting.begun_ns,
                seen_time_ns=waiting.seen_ns,
                pod=pods.of(_pod_of(waiting.labels)),
                container=waiting.labels.container or None,
                amounts=_as_texts(waiting.amounts),
            )
            for unnamed, waiting in self._waiting.items()
        ]
        cluster, name = split_key(node)
        return NodeCounters(
            group=group,
            cluster=cluster,
            node=name,
            time_ns=time_ns,
            boots=[CountedBoot(boot_id=boot_id, seq=seq) for boot_id, seq in boots.items()],
            gpus=gpus.values(),
            pods=pods.values(),
            quantities=list(COUNTED),
            series=series,
            waiting=waiting or None,
        )

    @classmethod
    def restore(cls, record: NodeCounters) -> "UseOfNode":
        """Return the counters from a record of the state topic.

        Raises ValueError if the record refers to a position that does not exist. Quantities that
        are no longer counted are left out.
        """
        node = cls()
        try:
            for counted in record.series:
                labels = _labels_of(record, counted)
                node.series[labels] = CountedUse(
                    labels.group,
                    counted.seen_time_ns,
                    _as_amounts(record, counted.amounts),
                    tuple(_in_order(record, counted.begun_time_ns)),
                )
            for waiting in record.waiting or ():
                labels = _labels_of(record, waiting)
                node._waiting[Unnamed(labels.gpu_uuid, waiting.ident)] = _UseWithoutNames(
                    labels,
                    waiting.since_time_ns,
                    waiting.seen_time_ns,
                    _as_amounts(record, waiting.amounts),
                )
        except IndexError as error:
            raise ValueError(f"invalid position: {error}") from error
        return node


class _Positions(Generic[K]):
    """Assigns positions to distinct values, in the order of their first use."""

    def __init__(self) -> None:
        self._positions: dict[K, int] = {}

    def of(self, value: K) -> int:
        return self._positions.setdefault(value, len(self._positions))

    def values(self) -> list[K]:
        return list(self._positions)


def _pod_of(labels: CountedLabels) -> CountedPod:
    return CountedPod(
        namespace=labels.namespace or None, name=labels.pod or None, uid=labels.pod_uid or None
    )


def _labels_of(record: NodeCounters, of: CountedSeries | WaitingUse) -> CountedLabels:
    category, job_id = Category.POD.value, None
    if isinstance(of, CountedSeries):
        category, job_id = of.category, of.job_id
    pod = _NO_POD if of.pod is None else record.pods[of.pod]
    return CountedLabels(
        record.gpus[of.gpu],
        category,
        pod.namespace or "",
        pod.name or "",
        pod.uid or "",
        of.container or "",
        job_id or "",
    )


def _as_texts(amounts: UsedAmounts) -> list[str | None]:
    return [None if amount is None else str(amount) for amount in amounts]


def _as_amounts(record: NodeCounters, texts: Sequence[str | None]) -> UsedAmounts:
    return [None if text is None else int(text) for text in _in_order(record, texts)]


def _in_order(record: NodeCounters, values: Sequence[T | None]) -> list[T | None]:
    """Return a record's values in the order of `COUNTED`; missing quantities are `None`."""
    by_name = dict(zip(record.quantities, values, strict=False))
    return [by_name.get(name) for name in COUNTED]
