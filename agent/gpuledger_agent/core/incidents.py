"""Incidents: what sources detect, which detections are new, and the incident made of one.

What happens to a GPU at an instant (an XID, an ECC error, a lost GPU, a driver that was reloaded)
is detected by several sources: the driver's events, the kernel's log, the readings, the driver's
own start and end. Whoever finds one comes here. No NVML here, and no clock.

1. `make_incident` has how severe each kind is, what to do, and the words for people.
2. `Deduplicator`: one source never reports one thing twice. So a detection is a repetition where
   another source has one within two seconds that is not paired yet; equal XIDs in a burst are
   paired one by one, the oldest first, and each real occurrence leaves exactly one incident,
   whichever comes first. A change of a GPU's health in its readings
   (`gpuledger_agent.core.health_changes`) comes here if no event has reported it.
3. `read_xid_line` reads the driver's line about an XID in the kernel's log, in all shapes that
   drivers write.
"""

import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import DeviceAllocation, Incident, IncidentProcess, Severity
from gpuledger.xids import RECOVERY_ACTION_CHANGED, UNKNOWN, find_xid, recovery_action


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """One observation of a fault, by one source."""

    kind: str
    """The incident's kind."""
    gpu_uuid: str
    """The GPU, or `PCI:<bus>` or `INDEX:<index>` where its UUID is not known."""
    time_ns: int
    """When it happened, nanoseconds since the epoch."""
    source: str
    """`nvml`, `kmsg` or `agent`."""
    xid: int | None = None
    """The XID, where it is one."""
    gpu_instance: int | None = None
    """The MIG GPU instance, where the source says."""
    compute_instance: int | None = None
    """The MIG compute instance, where the source says."""
    action: str | None = None
    """The action that the driver itself asks for."""
    severity: Severity | None = None
    """How severe it is, where the source says more than the kind does."""
    detail: str | None = None
    """The source's own words."""
    pid: int | None = None
    """The process that the source names."""
    command: str | None = None
    """The name of that process."""
    is_at_start: bool = False
    """Whether it was there at the agent's first reading."""
    ended_kinds: tuple[str, ...] = ()
    """The states that have ended, where it is about that."""


XID: Final = "xid"
NO_ACTION: Final = "NONE"


class _Kind(NamedTuple):
    severity: Severity
    message: str
    action: str | None = None


_KINDS: Final = {
    "ecc_uncorrected": _Kind(Severity.CRITICAL, "Uncorrected memory error"),
    "ecc_corrected_storm": _Kind(Severity.WARNING, "Corrected memory errors come in a storm"),
    "page_retirement_pending": _Kind(
        Severity.WARNING, "A part of the memory will be replaced at the next reset", "RESET_GPU"
    ),
    "page_retirement_failed": _Kind(
        Severity.CRITICAL, "A part of the memory could not be replaced", "CONTACT_SUPPORT"
    ),
    "row_remap_pending": _Kind(
        Severity.WARNING, "A memory row will be replaced at the next reset", "RESET_GPU"
    ),
    "row_remap_done": _Kind(Severity.INFO, "No memory row waits to be replaced any more"),
    "row_remap_failed": _Kind(
        Severity.CRITICAL, "A memory row could not be replaced", "CONTACT_SUPPORT"
    ),
    "poison_nonfatal": _Kind(Severity.WARNING, "Poisoned data was contained", "RESTART_APP"),
    "poison_fatal": _Kind(Severity.CRITICAL, "Poisoned data was used", "RESET_GPU"),
    "sram_threshold_exceeded": _Kind(
        Severity.CRITICAL,
        "The chip's own memory has more errors than its maker allows",
        "CONTACT_SUPPORT",
    ),
    "fabric_bandwidth_degraded": _Kind(
        Severity.WARNING, "The NVLink fabric has less bandwidth than it should"
    ),
    "fabric_route_recovery": _Kind(
        Severity.WARNING, "Routes of the NVLink fabric are being recovered"
    ),
    "fabric_route_unhealthy": _Kind(
        Severity.CRITICAL, "A route of the NVLink fabric is unhealthy: work over NVLink fails"
    ),
    "fabric_access_timeout": _Kind(
        Severity.WARNING, "An access over the NVLink fabric timed out and is recovered from"
    ),
    "nvlink_recovery_failed": _Kind(Severity.CRITICAL, "An NVLink could not be recovered"),
    "pcie_link_degraded": _Kind(
        Severity.WARNING,
        "The PCIe link works below what GPU and machine can do",
        "CHECK_MECHANICALS",
    ),
    "hardware_thermal_slowdown": _Kind(
        Severity.WARNING, "The hardware holds the clocks down for the temperature"
    ),
    "power_brake_slowdown": _Kind(
        Severity.WARNING, "The machine's power supply has the clocks held down"
    ),
    "state_ended": _Kind(Severity.INFO, "No longer so"),
    "gpu_unavailable": _Kind(Severity.CRITICAL, "The GPU is not available"),
    "recovery_action": _Kind(Severity.WARNING, "What the driver needs to recover has changed"),
    "mig_changed": _Kind(Severity.INFO, "The layout of MIG instances has changed"),
    "gpu_lost": _Kind(Severity.CRITICAL, "The driver no longer answers for this GPU"),
    "gpu_recovered": _Kind(Severity.INFO, "The driver answers for this GPU again"),
    "driver_reloaded": _Kind(Severity.INFO, "The driver was loaded anew"),
    "agent_ended": _Kind(
        Severity.CRITICAL, "The agent ends because no GPU answers; it is then restarted"
    ),
    "driver_unbound": _Kind(Severity.INFO, "The driver lets go of this GPU"),
}
KINDS: Final = frozenset({XID, *_KINDS})
"""All kinds that the agent reports."""


def make_incident(
    *,
    kind: str,
    node: NodeId,
    boot_id: str,
    gpu_uuid: str,
    time_ns: int,
    source: str = "agent",
    xid: int | None = None,
    gpu_index: int | None = None,
    gpu_instance: int | None = None,
    compute_instance: int | None = None,
    action: str | None = None,
    severity: Severity | None = None,
    detail: str | None = None,
    processes: Sequence[IncidentProcess] = (),
    allocations: Sequence[DeviceAllocation] = (),
    is_at_start: bool = False,
    ended_kinds: Sequence[str] = (),
) -> Incident:
    """Fill in an incident of one of `KINDS`; raises KeyError for another kind.

    `detail` stands behind the kind's own words. `action` and `severity` are given where more is
    known than the kind or the XID says, such as the action that the driver itself asks for.
    """
    known = find_xid(xid) if kind == XID and xid is not None else None
    if known:
        # Of a code that is not in the catalogue at least the code is said.
        words = f"{known.meaning}: {known.code}" if known.category == UNKNOWN else known.meaning
        own_severity, advice = known.severity, known.immediate
    else:
        own_severity, words, advice = _KINDS[kind]
    asks = kind == "recovery_action" or (kind == XID and xid == RECOVERY_ACTION_CHANGED)
    if asks and action is not None:
        # What the driver itself asks for says how severe it is.
        own_severity = Severity.INFO if action == NO_ACTION else Severity.CRITICAL
    if kind == "recovery_action" and action is not None:
        words = f"The driver asks for {'nothing more' if action == NO_ACTION else action}"
    if is_at_start and ended_kinds:
        words = "Not so"
    return Incident(
        cluster=node.cluster,
        node=node.node,
        boot_id=boot_id,
        gpu_uuid=gpu_uuid,
        time_ns=time_ns,
        kind=kind,
        source=source,
        gpu_index=gpu_index,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
        severity=severity or own_severity,
        xid=xid,
        mnemonic=known.mnemonic if known else None,
        category=known.category if known else None,
        action=action or advice,
        message=f"{words}: {detail}" if detail else words,
        processes=list(processes),
        allocations=list(allocations) or None,
        present_at_start=is_at_start or None,
        ended_kinds=list(ended_kinds) or None,
    )


def severities_of(kind: str) -> tuple[Severity, ...]:
    """Return the severities that incidents of one of `KINDS` may have."""
    if kind == XID:
        return tuple(Severity)
    own = _KINDS[kind].severity
    return (Severity.INFO, own, Severity.CRITICAL) if kind == "recovery_action" else (own,)


WINDOW_NS: Final = 2 * NS_PER_SECOND
# Of some hundred XIDs on 8 GPUs; a line in the log may name any GPU and any code.
_MAX_KEYS: Final = 256
_MAX_UNPAIRED: Final = 512

Key = tuple[str, int | str]
"""GPU and XID, or GPU and kind."""


class Deduplicator:
    """The detections that no other source has had yet, a bounded number of them."""

    def __init__(self) -> None:
        self._unpaired: OrderedDict[Key, dict[str, deque[int]]] = OrderedDict()

    def is_new(self, key: Key, *, source: str, time_ns: int, window_ns: int = WINDOW_NS) -> bool:
        """Record a detection; return whether no other source has had it within the window."""
        by_source = self._unpaired.setdefault(key, {})
        self._unpaired.move_to_end(key)
        if len(self._unpaired) > _MAX_KEYS:
            self._unpaired.popitem(last=False)
        for other, times_ns in by_source.items():
            near = (ns for ns in times_ns if abs(ns - time_ns) <= window_ns)
            if other != source and (paired_ns := next(near, None)) is not None:
                # The oldest of equal ones: each is paired once.
                times_ns.remove(paired_ns)
                return False
        by_source.setdefault(source, deque(maxlen=_MAX_UNPAIRED)).append(time_ns)
        return True


_LINE: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<bus>(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?"
    r"(?: GPU-I:(?P<gpu_instance>\d{1,9}))?(?: GPU-CI:(?P<compute_instance>\d{1,9}))?\): "
    r"(?P<xid>\d{1,9})(?!\d)(?:, *(?P<rest>.*))?",
    re.ASCII,
)
_PID: Final = re.compile(r"^pid='?(?P<pid>\d{1,9}|<unknown>)'?(?:, *|$)", re.ASCII)
_NAME: Final = re.compile(r"^name='?(?P<name>[^,']*)'?(?:, *|$)")
_NEW_ACTION: Final = re.compile(r"\bto 0x([0-9a-fA-F]{1,8})\b")
_NVLINK_5: Final = range(144, 151)
_FATAL: Final = re.compile(r"\bFatal\b")
_BUS_PARTS: Final = 3

Bus = tuple[int, int, int]
"""Domain, bus and device."""


class XidLine(NamedTuple):
    """The fields of a line of the kernel's log that reports an XID."""

    bus: Bus
    xid: int
    gpu_instance: int | None
    compute_instance: int | None
    pid: int | None
    command: str | None
    words: str
    action: str | None
    severity: Severity | None


def read_xid_line(text: str) -> XidLine | None:
    """Return what a line says; `None` where it does not begin as the driver's of an XID do."""
    found = _LINE.match(text)
    bus = found and read_bus(found["bus"])
    if not found or not bus:
        return None
    pid, command, words = _split(found["rest"] or "")
    xid = int(found["xid"])
    action = severity = None
    if xid == RECOVERY_ACTION_CHANGED and (matched := _NEW_ACTION.search(words)):
        action = recovery_action(int(matched[1], 16))
    # Of NVLink 5's errors the code is the same for what was contained and what was not.
    if xid in _NVLINK_5 and _FATAL.search(words):
        severity = Severity.CRITICAL
    return XidLine(
        bus=bus,
        xid=xid,
        gpu_instance=_number(found["gpu_instance"]),
        compute_instance=_number(found["compute_instance"]),
        pid=pid,
        command=command,
        words=words,
        action=action,
        severity=severity,
    )


def read_bus(text: str) -> Bus | None:
    """Read a PCI address such as `00000000:1B:00.0` or `0000:1b:00`; `None` where it is none."""
    parts = text.partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    if len(numbers) == _BUS_PARTS - 1:
        numbers.insert(0, 0)
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == _BUS_PARTS else None


def write_bus(bus: Bus) -> str:
    """Write a PCI address as the kernel's log does."""
    domain, number, device = bus
    return f"PCI:{domain:04x}:{number:02x}:{device:02x}"


def _split(rest: str) -> tuple[int | None, str | None, str]:
    """Split the process from the rest of the line; a driver that knows none writes `<unknown>`."""
    pid = command = None
    if found := _PID.match(rest):
        pid, rest = _number(found["pid"]), rest[found.end() :]
        if named := _NAME.match(rest):
            command, rest = named["name"], rest[named.end() :]
    known = command and command != "<unknown>"
    return pid, command if known else None, rest.strip()


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
