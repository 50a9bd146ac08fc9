"""Changes in one GPU's health readings: states that began or ended, and new errors.

A state is a condition that lasts, such as an unhealthy fabric. If the first reading shows a state,
the state began before the agent started, and is reported as present at the start. If the first
reading does not show the state, its absence is reported once too, because an agent that ran before
may have reported the state's start. After that, only changes are reported.

A counter that rose means new errors. A counter that fell was restarted, for example by a reload of
the driver, and is not reported.

Two kinds of states depend on the workload: clocks that the hardware slows down, and a PCIe link
slower than its maximum. Such a state begins when readings have shown it for a long time without a
break, and ends when readings have not shown it for an equally long time. A link slows down while
the GPU is idle, so it is only evaluated in performance state 0; in other states its health is
unknown.

Each group of readings is queried at its own interval. If a tick has no readings of a group, the
states that the group shows do not change. Between two readings of the performance state, the last
one counts. This module does not read a clock: callers pass times of the monotonic clock.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_MINUTE
from gpuledger.records import GpuDetails, GpuHealth, Incident
from gpuledger.xids import RECOVERY_ACTION_CHANGED, recovery_action

STATE_ENDED: Final = "state_ended"
_ACTION: Final = "recovery_action"
_REMAP: Final = "row_remap_pending"
_NO_ACTION: Final = "none"
_FLAGS: Final[Mapping[str, str]] = {
    _REMAP: "remapped_rows_pending",
    "row_remap_failed": "remapped_rows_failed",
    "sram_threshold_exceeded": "sram_threshold_exceeded",
    "page_retirement_pending": "retired_pages_pending",
    "fabric_bandwidth_degraded": "fabric_bandwidth_degraded",
    "fabric_route_recovery": "fabric_route_recovery",
    "fabric_route_unhealthy": "fabric_route_unhealthy",
    "fabric_access_timeout": "fabric_access_timeout",
}
"""Health fields that report a state, by the kind of the state's incident."""
_SLOWDOWNS: Final[Mapping[str, int]] = {
    "hardware_thermal_slowdown": 0x40,
    "power_brake_slowdown": 0x80,
}
"""Bits of NVML's clock-throttle reasons, by the incident's kind."""
_PCIE: Final = "pcie_link_degraded"
_PCIE_NS: Final = NS_PER_MINUTE
_MAX_PCIE_GENERATION: Final = 16
_MAX_PCIE_WIDTH: Final = 32
_LONGEST_GAP_NS: Final = 2 * NS_PER_MINUTE
"""Maximum time between two readings of a state. After a longer gap, earlier readings no longer
count. Ticks, and readings of throttle reasons and performance state, are at most a minute apart."""
_EVENT_NS: Final = NS_PER_MINUTE
"""Maximum time between a reading and an event that reports the same condition."""
_MAX_EVENTS: Final = 64
"""Maximum number of events kept per GPU: more than there are kinds and XIDs that report health."""
_SAME: Final[Mapping[str, set[str | int]]] = {
    _REMAP: {"page_retirement_pending", 63},
    "page_retirement_pending": {"page_retirement_pending", 63},
    "row_remap_failed": {"page_retirement_failed", 64},
    _ACTION: {_ACTION, RECOVERY_ACTION_CHANGED},
    "ecc_uncorrected": {"ecc_uncorrected", 48, 94, 95, 140, 171, 172},
}
"""Kinds and XIDs of events that report the same condition as a change of health, by the change's
kind."""


class HealthChange(NamedTuple):
    """A change of a GPU's health to report as an incident.

    The change is a state that began, new errors, a new recovery action, states that ended, or
    states that the first reading did not show.
    """

    kind: str
    """The incident's kind."""
    action: str | None = None
    """The action that the driver requests, if the change is a new requested action."""
    detail: str | None = None
    """Further details."""
    is_at_start: bool = False
    """Whether the change reports the GPU's condition at the agent's first reading."""
    ended_kinds: tuple[str, ...] = ()
    """Kinds of the states that ended, or that the first reading did not show."""


@dataclass(slots=True)
class _Lasting:
    """A state that begins and ends only after readings have shown the change for long enough."""

    value: bool | None = None
    """Whether the state is present; `None` until that is known."""
    since_ns: int | None = None
    """Time of the first of the latest readings that contradict `value`; `None` if the last reading
    agreed with it."""

    def follow(self, *, holds: bool, now_ns: int, for_ns: int) -> bool | None:
        """Return whether the state is present after a reading; `None` if that is not known yet.

        `holds` is whether the reading shows the state. The result changes after readings have
        contradicted it for `for_ns`. If the first reading does not show the state, the state is
        absent at once.
        """
        if self.value is None and not holds:
            self.value = False
        if holds is self.value:
            self.since_ns = None
        elif self.since_ns is None:
            self.since_ns = now_ns
        elif now_ns - self.since_ns >= for_ns:
            self.value, self.since_ns = holds, None
        return self.value


@dataclass(slots=True, kw_only=True)
class HealthWatch:
    """Compares one GPU's health readings with earlier ones to find changes."""

    slowdown_ns: int
    """How long the hardware must slow the clocks down before the slowdown counts as a state."""
    _known: GpuHealth = field(default_factory=GpuHealth)
    _states: dict[str, bool] = field(default_factory=dict)
    _lasting: dict[str, _Lasting] = field(
        default_factory=lambda: {kind: _Lasting() for kind in (*_SLOWDOWNS, _PCIE)}
    )
    _seen_ns: int = 0
    _reasons_ns: int = 0
    _is_at_work: bool = False
    """Whether the GPU's last known performance state is 0."""
    _at_work_ns: int = 0

    def update(self, details: GpuDetails, *, now_ns: int) -> list[HealthChange]:
        """Return the changes between a tick's readings of the GPU and earlier readings."""
        if now_ns - self._seen_ns > _LONGEST_GAP_NS:
            self._interrupt(*self._lasting)
        self._seen_ns = now_ns
        self._follow_work(details.performance_state, now_ns=now_ns)
        if details.health is None and details.throttling is None:
            return []  # nearly all ticks: they do not query health and reasons
        health = details.health or GpuHealth()
        values = dict(self._values(details, now_ns=now_ns))
        if health.recovery_action is not None:
            values[_ACTION] = health.recovery_action != _NO_ACTION
        changes = [
            *self._changes_of_action(health),
            *_new_errors(self._known, health),
            *self._begun(values),
            *self._ended(values),
        ]
        self._states |= values
        if details.health is not None:
            self._known = _merge(self._known, health)
        return changes

    def _begun(self, values: Mapping[str, bool]) -> Iterator[HealthChange]:
        for kind, value in values.items():
            before = self._states.get(kind)
            # The requested action is reported by `_changes_of_action`.
            if value and not before and kind != _ACTION:
                yield HealthChange(kind, is_at_start=before is None)

    def _ended(self, values: Mapping[str, bool]) -> Iterator[HealthChange]:
        well = [kind for kind, value in values.items() if not value]
        if at_start := tuple(kind for kind in well if kind not in self._states):
            yield HealthChange(STATE_ENDED, is_at_start=True, ended_kinds=at_start)
        ended = {kind for kind in well if self._states.get(kind)}
        if _REMAP in ended:
            yield HealthChange("row_remap_done")
        # The ends of these two are reported by other kinds: `row_remap_done`, `recovery_action`.
        if named := tuple(kind for kind in well if kind in ended - {_REMAP, _ACTION}):
            yield HealthChange(STATE_ENDED, ended_kinds=named)

    def _changes_of_action(self, health: GpuHealth) -> Iterator[HealthChange]:
        requested, before = health.recovery_action, self._known.recovery_action
        if requested is None or requested == before or (before is None and requested == _NO_ACTION):
            return
        yield HealthChange(_ACTION, recovery_action(requested), is_at_start=before is None)

    def _values(self, details: GpuDetails, *, now_ns: int) -> Iterator[tuple[str, bool]]:
        """Yield the kind of each state that this tick's readings describe, and whether it holds."""
        if details.health is not None:
            for kind, name in _FLAGS.items():
                flag: bool | None = getattr(details.health, name)
                if flag is not None:
                    yield kind, flag
        if details.throttling is not None:
            yield from self._slowdowns(details.throttling.reasons, now_ns=now_ns)
        if details.health is not None and self._is_at_work:
            # Readings outside of performance state 0 may describe a link in power saving.
            degraded = is_pcie_degraded(details.health)
            yield from self._follow(_PCIE, holds=degraded, now_ns=now_ns, for_ns=_PCIE_NS)

    def _slowdowns(self, reasons: int | None, *, now_ns: int) -> Iterator[tuple[str, bool]]:
        if now_ns - self._reasons_ns > _LONGEST_GAP_NS:
            self._interrupt(*_SLOWDOWNS)
        self._reasons_ns = now_ns
        for kind, bit in _SLOWDOWNS.items():
            holds = None if reasons is None else bool(reasons & bit)
            yield from self._follow(kind, holds=holds, now_ns=now_ns, for_ns=self.slowdown_ns)

    def _follow_work(self, performance_state: int | None, *, now_ns: int) -> None:
        if performance_state is not None:
            self._is_at_work, self._at_work_ns = performance_state == 0, now_ns
        elif now_ns - self._at_work_ns > _LONGEST_GAP_NS:
            self._is_at_work = False
        if not self._is_at_work:
            self._interrupt(_PCIE)

    def _follow(
        self, kind: str, *, holds: bool | None, now_ns: int, for_ns: int
    ) -> Iterator[tuple[str, bool]]:
        if holds is None:
            self._interrupt(kind)
            return
        value = self._lasting[kind].follow(holds=holds, now_ns=now_ns, for_ns=for_ns)
        if value is not None:
            yield kind, value

    def _interrupt(self, *kinds: str) -> None:
        for kind in kinds:
            self._lasting[kind].since_ns = None


def is_pcie_degraded(health: GpuHealth) -> bool | None:
    """Return whether the PCIe link has fewer lanes or a lower generation than its maximum.

    Return `None` if that is unknown.
    """
    known = [
        now < maximum
        for now, maximum, limit in (
            (health.pcie_link_generation, health.pcie_max_link_generation, _MAX_PCIE_GENERATION),
            (health.pcie_link_width, health.pcie_max_link_width, _MAX_PCIE_WIDTH),
        )
        # A working link has at least one lane, and none has thousands; ignore other readings.
        if now is not None and maximum is not None and now > 0 and maximum <= limit
    ]
    return any(known) if known else None


def is_covered_by(change: HealthChange, *, kind: str, xid: int | None, action: str | None) -> bool:
    """Return whether an incident reports the same condition as a change of health.

    If the change is a new recovery action, the incident must name the same action.
    """
    same = _SAME.get(change.kind, set())
    if kind not in same and xid not in same:
        return False
    return change.kind != _ACTION or action == change.action


class RecentEvents:
    """The latest events of one GPU, used to detect changes of health that an event has reported."""

    def __init__(self) -> None:
        self._latest_ns: dict[tuple[str, int | None, str | None], int] = {}
        """Time of the latest event by kind, XID and action, so that repeated events take only one
        entry."""

    def record(self, incident: Incident) -> None:
        """Record an event's time; if there are too many events, forget the oldest."""
        key = (incident.kind, incident.xid, incident.action)
        self._latest_ns.pop(key, None)
        self._latest_ns[key] = incident.time_ns
        if len(self._latest_ns) > _MAX_EVENTS:
            del self._latest_ns[next(iter(self._latest_ns))]

    def cover(self, change: HealthChange, *, time_ns: int) -> bool:
        """Return whether an event reported the same condition within a minute of `time_ns`."""
        return any(
            abs(time_ns - reported_ns) <= _EVENT_NS
            and is_covered_by(change, kind=kind, xid=xid, action=action)
            for (kind, xid, action), reported_ns in self._latest_ns.items()
        )


def _new_errors(before: GpuHealth, now: GpuHealth) -> Iterator[HealthChange]:
    old, new = before.ecc_uncorrected_volatile_total, now.ecc_uncorrected_volatile_total
    if old is not None and new is not None and new > old:
        yield HealthChange("ecc_uncorrected", detail=f"{new - old} more, {new} in all")
    failed = before.nvlink_link_failed_recoveries_totals or {}
    risen = [
        link
        for link, total in (now.nvlink_link_failed_recoveries_totals or {}).items()
        if link in failed and total > failed[link]
    ]
    if risen:
        links = "link" if len(risen) == 1 else "links"
        yield HealthChange("nvlink_recovery_failed", detail=f"{links} {', '.join(risen)}")


def _merge(before: GpuHealth, now: GpuHealth) -> GpuHealth:
    """Return the new health values, with missing ones filled in from the last known values."""
    errors = now.ecc_uncorrected_volatile_total
    failed = {
        **(before.nvlink_link_failed_recoveries_totals or {}),
        **(now.nvlink_link_failed_recoveries_totals or {}),
    }
    return GpuHealth(
        recovery_action=now.recovery_action or before.recovery_action,
        ecc_uncorrected_volatile_total=(
            before.ecc_uncorrected_volatile_total if errors is None else errors
        ),
        nvlink_link_failed_recoveries_totals=failed or None,
    )
