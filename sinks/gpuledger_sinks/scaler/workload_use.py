"""The GPU use of the workloads of one cluster over the last seconds of event time. Pure.

Each node has a window of samples that ends now. A pod's use is its mean over all samples of its
node in the window: a pod that is not in a sample used nothing then. The use of pods therefore adds
up to the use of their devices, as in series.

Use that cannot be known is an error and never 0, because an autoscaler would remove replicas.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, Literal, NamedTuple, get_args

from gpuledger.clock import NS_PER_SECOND
from gpuledger.ledger.entries import PodIndex
from gpuledger.records import Category, Entry, GpuEvent

Metric = Literal["gpus", "utilization", "memory"]
METRICS: Final[tuple[Metric, ...]] = get_args(Metric)
_Amounts = tuple[float | None, ...]
"""For each metric: the value times the length of the sample in nanoseconds; `None` if unknown."""


class Workload(NamedTuple):
    """The owner of pods."""

    namespace: str
    kind: str
    name: str


class UnknownUseError(Exception):
    """The use of a workload is not known."""


class AbsentError(UnknownUseError):
    """No sample in the window has a pod of the workload."""


class _Node:
    """The samples of a node in the window; if none arrives in time any more, its last ones."""

    def __init__(self) -> None:
        self.received_ns = 0
        """When the newest event arrived, in time or not."""
        self.intervals: dict[int, int] = {}
        """The length of each sample, by its time."""
        self.pods: dict[Workload, dict[str, dict[int, _Amounts]]] = {}
        """The amounts of each pod in each sample, by workload, UID and time."""

    def forget_until(self, begin_ns: int) -> None:
        """Forget samples until `begin_ns`, and pods that have no others."""
        self.intervals = {at: length for at, length in self.intervals.items() if at > begin_ns}
        pods = {
            workload: {
                uid: kept
                for uid, samples in of_workload.items()
                if (kept := {at: amounts for at, amounts in samples.items() if at > begin_ns})
            }
            for workload, of_workload in self.pods.items()
        }
        self.pods = {workload: of_workload for workload, of_workload in pods.items() if of_workload}


class WorkloadUse:
    """Keeps the use of each pod, and adds it up by workload."""

    def __init__(
        self, *, cluster: str, window_seconds: float, stale_after_seconds: float, max_workloads: int
    ) -> None:
        """Keep samples of `cluster`; forget a node that sends nothing for `stale_after_seconds`."""
        self._cluster, self._max_workloads = cluster, max_workloads
        self._window_ns = round(window_seconds * NS_PER_SECOND)
        self._stale_ns = round(stale_after_seconds * NS_PER_SECOND)
        self._nodes: dict[str, _Node] = {}
        self._workloads: set[Workload] = set()

    def take(self, event: GpuEvent, now_ns: int) -> int:
        """Add a sample, unless it is repeated or not in the window.

        Returns the number of pods that were left out, because there are too many workloads. Raises
        `ValueError` if the event refers to something that it does not list.
        """
        begin_ns, at = now_ns - self._window_ns, event.time_ns
        if event.cluster != self._cluster:
            return 0
        is_in_window = begin_ns < at <= now_ns + self._window_ns
        node = self._nodes.get(event.node)
        if node is None and is_in_window:
            node = self._nodes[event.node] = _Node()
        if node is None:
            return 0
        node.received_ns = now_ns
        if not is_in_window or at in node.intervals:
            return 0
        left_out = 0
        of_pods = _amounts_of(event)
        node.intervals[at] = event.interval_ns
        for (workload, uid), amounts in of_pods.items():
            if workload not in self._workloads and len(self._workloads) >= self._max_workloads:
                left_out += 1
                continue
            self._workloads.add(workload)
            node.pods.setdefault(workload, {}).setdefault(uid, {})[at] = amounts
        node.forget_until(begin_ns)
        return left_out

    def forget_stale(self, now_ns: int) -> None:
        """Forget nodes that have sent nothing for too long, and workloads without pods."""
        begin_ns = now_ns - self._stale_ns
        self._nodes = {
            name: node for name, node in self._nodes.items() if node.received_ns > begin_ns
        }
        self._workloads = {workload for node in self._nodes.values() for workload in node.pods}

    def total(self, workload: Workload, metric: Metric, now_ns: int) -> float:
        """Return the sum of the use of all pods of a workload.

        Raises `UnknownUseError` if the use of any of them is unknown.
        """
        begin_ns, place = now_ns - self._window_ns, METRICS.index(metric)
        found: list[float] = []
        for name, node in self._nodes.items():
            if workload not in node.pods:
                continue
            intervals = {at: length for at, length in node.intervals.items() if at > begin_ns}
            if not intervals:
                raise UnknownUseError(f"node {name} has pods of the workload, but no new samples")
            for uid, samples in node.pods[workload].items():
                present = {at: all_[place] for at, all_ in samples.items() if at in intervals}
                known = [amount for amount in present.values() if amount is not None]
                unknown_ns = sum(intervals[at] for at, one in present.items() if one is None)
                known_ns = sum(intervals.values()) - unknown_ns
                if present and not (known and known_ns):
                    raise UnknownUseError(f"{metric} of the pod with UID {uid} is unknown")
                found += [sum(known) / known_ns] if present else []
        if not found:
            raise AbsentError("no sample of the window has a pod of the workload")
        return sum(found)


def _amounts_of(event: GpuEvent) -> Mapping[tuple[Workload, str], _Amounts]:
    """Return the amounts of each pod that uses GPUs or to which GPUs are allocated."""
    index, of_pods = PodIndex(event), dict[tuple[Workload, str], list[Entry]]()
    for entry in chain.from_iterable(books.entries for books in event.gpus):
        pod = index.user_of(entry).pod or index.allocatee_of(entry).pod
        if pod and pod.uid and pod.namespace and pod.owner_kind and pod.owner_name:
            workload = Workload(pod.namespace, pod.owner_kind, pod.owner_name)
            of_pods.setdefault((workload, pod.uid), []).append(entry)
    return {pod: _amounts(entries, event.interval_ns) for pod, entries in of_pods.items()}


def _amounts(entries: Sequence[Entry], interval_ns: int) -> _Amounts:
    """Return the amounts of a pod from its entries and the idle ones that are allocated to it."""
    busy_ns = _used(entries, [entry.busy_ns for entry in entries])
    memory_bytes = _used(entries, [entry.memory_bytes for entry in entries])
    allocated_ns = sum(entry.allocated_ns or 0 for entry in entries)
    return (
        busy_ns,
        busy_ns * interval_ns / allocated_ns if busy_ns is not None and allocated_ns else None,
        None if memory_bytes is None else memory_bytes * interval_ns,
    )


def _used(entries: Sequence[Entry], amounts: Sequence[int | None]) -> int | None:
    """Return the sum of the amounts that a pod used; `None` if any amount is unknown."""
    # The amount of an idle entry only shows that the use of its device is known.
    both = [*zip(entries, amounts, strict=True)]
    if any(amount is None for _, amount in both):
        return None
    return sum(amount or 0 for entry, amount in both if entry.category is Category.POD)
