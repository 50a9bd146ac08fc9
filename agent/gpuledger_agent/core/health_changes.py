"""What readings of one GPU say has come up or ended: states of it, and errors that are new.

A state is so or not so: a row could not be replaced, the fabric is unhealthy. What is so at the
first reading was so before the agent began, and is told as that; what is not so is told once too,
as an agent that ran before may have told that it is. From then on changes are told.

A counter that rose tells errors that are new. One that fell has begun again, as after a reload of
the driver, and tells nothing.

Two states come and go with the work: clocks that the hardware holds down, and a PCIe link below
what it can do. They begin once they have held for long without a break, and end likewise. A link
trains down while the GPU is idle, so it is looked at in performance state 0 alone; in another one
nothing is known of it. Each group of readings is asked at its own pace: a tick without one says
nothing, and the performance state is the last that was read. No clock here: time is given, by the
monotonic clock.
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
"""The states that a field of the health shows, by the incident's kind."""
_SLOWDOWNS: Final[Mapping[str, int]] = {
    "hardware_thermal_slowdown": 0x40,
    "power_brake_slowdown": 0x80,
}
"""NVML's bits of why the clocks are held down."""
_PCIE: Final = "pcie_link_degraded"
_PCIE_NS: Final = NS_PER_MINUTE
_MAX_PCIE_GENERATION: Final = 16
_MAX_PCIE_WIDTH: Final = 32
_LONGEST_GAP_NS: Final = 2 * NS_PER_MINUTE
"""What held before a longer silence says nothing of what holds after it; a tick is a minute at
most, and so is the time between two readings of the reasons or of the performance state."""
_EVENT_NS: Final = NS_PER_MINUTE
"""How long around a reading an event may come that says the same."""
_MAX_EVENTS: Final = 64
"""There are fewer kinds and XIDs that say anything of a GPU's health."""
_SAME: Final[Mapping[str, set[str | int]]] = {
    _REMAP: {"page_retirement_pending", 63},
    "page_retirement_pending": {"page_retirement_pending", 63},
    "row_remap_failed": {"page_retirement_failed", 64},
    _ACTION: {_ACTION, RECOVERY_ACTION_CHANGED},
    "ecc_uncorrected": {"ecc_uncorrected", 48, 94, 95, 140, 171, 172},
}
"""The events, by kind or XID, that say as much as a change of health."""


class HealthChange(NamedTuple):
    """Something that is worse than it was, or well again."""

    kind: str
    """The incident's kind."""
    action: str | None = None
    """What the driver asks for, where it is about that."""
    detail: str | None = None
    """What more is known of it."""
    is_at_start: bool = False
    """Whether it was so at the first reading that says anything of it."""
    ended_kinds: tuple[str, ...] = ()
    """The states that are no longer so, or were not at the first reading."""


@dataclass(slots=True)
class _Lasting:
    """A state that begins and ends once readings have said so for long."""

    value: bool | None = None
    """What it is; `None` before anything is known."""
    since_ns: int | None = None
    """Since when the readings say otherwise."""

    def follow(self, *, holds: bool, now_ns: int, for_ns: int) -> bool | None:
        """Take a reading; return what it is now."""
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
    """What is known of the health of one GPU."""

    slowdown_ns: int
    """For how long the hardware holds the clocks down before that is a state."""
    _known: GpuHealth = field(default_factory=GpuHealth)
    _states: dict[str, bool] = field(default_factory=dict)
    _lasting: dict[str, _Lasting] = field(
        default_factory=lambda: {kind: _Lasting() for kind in (*_SLOWDOWNS, _PCIE)}
    )
    _seen_ns: int = 0
    _reasons_ns: int = 0
    _is_at_work: bool = False
    """Whether the GPU was in performance state 0 when that was read last."""
    _at_work_ns: int = 0

    def update(self, details: GpuDetails, *, now_ns: int) -> list[HealthChange]:
        """Take a tick's readings of the GPU; return what has come up or ended."""
        if now_ns - self._seen_ns > _LONGEST_GAP_NS:
            self._interrupt(*self._lasting)
        self._seen_ns = now_ns
        self._follow_work(details.performance_state, now_ns=now_ns)
        if details.health is None and details.throttling is None:
            return []  # nearly all ticks: health and reasons are not asked in each
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
            # What the driver asks for says more than that it asks.
            if value and not before and kind != _ACTION:
                yield HealthChange(kind, is_at_start=before is None)

    def _ended(self, values: Mapping[str, bool]) -> Iterator[HealthChange]:
        well = [kind for kind, value in values.items() if not value]
        if at_start := tuple(kind for kind in well if kind not in self._states):
            yield HealthChange(STATE_ENDED, is_at_start=True, ended_kinds=at_start)
        ended = {kind for kind in well if self._states.get(kind)}
        if _REMAP in ended:
            yield HealthChange("row_remap_done")
        # These two have incidents of their end that are older than this one.
        if named := tuple(kind for kind in well if kind in ended - {_REMAP, _ACTION}):
            yield HealthChange(STATE_ENDED, ended_kinds=named)

    def _changes_of_action(self, health: GpuHealth) -> Iterator[HealthChange]:
        requested, before = health.recovery_action, self._known.recovery_action
        if requested is None or requested == before or (before is None and requested == _NO_ACTION):
            return
        yield HealthChange(_ACTION, recovery_action(requested), is_at_start=before is None)

    def _values(self, details: GpuDetails, *, now_ns: int) -> Iterator[tuple[str, bool]]:
        """Yield the states of which this tick says anything."""
        if details.health is not None:
            for kind, name in _FLAGS.items():
                flag: bool | None = getattr(details.health, name)
                if flag is not None:
                    yield kind, flag
        if details.throttling is not None:
            yield from self._slowdowns(details.throttling.reasons, now_ns=now_ns)
        if details.health is not None and self._is_at_work:
            # By readings in that state alone: one of before may be of a link that was asleep.
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
    """Return whether the PCIe link is below what it can do; `None` where that is not known."""
    known = [
        now < maximum
        for now, maximum, limit in (
            (health.pcie_link_generation, health.pcie_max_link_generation, _MAX_PCIE_GENERATION),
            (health.pcie_link_width, health.pcie_max_link_width, _MAX_PCIE_WIDTH),
        )
        # A working link has a lane, and none has thousands: else it is no reading of one.
        if now is not None and maximum is not None and now > 0 and maximum <= limit
    ]
    return any(known) if known else None


def is_covered_by(change: HealthChange, *, kind: str, xid: int | None, action: str | None) -> bool:
    """Return whether an incident reports the same as a change of health.

    An incident of a new recovery action has to name that action.
    """
    same = _SAME.get(change.kind, set())
    if kind not in same and xid not in same:
        return False
    return change.kind != _ACTION or action == change.action


class RecentEvents:
    """What events have said of one GPU of late; bounded."""

    def __init__(self) -> None:
        self._latest_ns: dict[tuple[str, int | None, str | None], int] = {}
        """When each was said last, by kind, XID and action: a storm is one entry."""

    def record(self, incident: Incident) -> None:
        """Record what an event said."""
        key = (incident.kind, incident.xid, incident.action)
        self._latest_ns.pop(key, None)
        self._latest_ns[key] = incident.time_ns
        if len(self._latest_ns) > _MAX_EVENTS:
            del self._latest_ns[next(iter(self._latest_ns))]

    def cover(self, change: HealthChange, *, time_ns: int) -> bool:
        """Return whether an event said the same within a minute of `time_ns`."""
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
    """Keep what is compared, and the last known value where this reading has none."""
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
