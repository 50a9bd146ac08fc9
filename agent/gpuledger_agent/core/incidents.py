"""Makes incidents from the detections of several sources, and removes duplicate detections.

Several sources can detect the same event of a GPU, such as an XID, an ECC error, a lost GPU or a
reloaded driver. The sources are the driver's events, the kernel log, the readings, and the agent
itself, which detects lost GPUs and restarts of the driver. All of them use this module, which
depends neither on NVML nor on a clock.

1. `make_incident` adds each kind's severity, advice and message.
2. `Deduplicator` removes repetitions. One source never reports the same event twice. A detection is
   therefore a repetition if another source detected the same event within two seconds, and that
   detection is not yet paired with another one. Equal XIDs in a burst are paired one by one, oldest
   first. Each real event thus results in exactly one incident, whichever source is first. A change
   in a GPU's health readings (`gpuledger_agent.core.health_changes`) only becomes an incident if no
   event has reported it.
3. `read_xid_line` parses the driver's kernel log lines about XIDs, in all formats that drivers
   write.
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
    """One event of a GPU, such as an XID, as one source reports it."""

    kind: str
    """The incident's kind."""
    gpu_uuid: str
    """The GPU, or `PCI:<bus>` or `INDEX:<index>` if its UUID is unknown."""
    time_ns: int
    """When the event happened, in nanoseconds since the epoch."""
    source: str
    """`nvml`, `kmsg` or `agent`."""
    xid: int | None = None
    """The XID, if the kind is `xid`."""
    gpu_instance: int | None = None
    """The MIG GPU instance, if the source reports it."""
    compute_instance: int | None = None
    """The MIG compute instance, if the source reports it."""
    action: str | None = None
    """The action that the driver itself requests."""
    severity: Severity | None = None
    """The severity, if the source reports one that differs from that of the kind or XID."""
    detail: str | None = None
    """The source's own text."""
    pid: int | None = None
    """The process that the source names."""
    command: str | None = None
    """The name of that process."""
    is_at_start: bool = False
    """Whether the agent's first reading already showed the condition."""
    ended_kinds: tuple[str, ...] = ()
    """Kinds of the states that have ended, if the detection is of kind `state_ended`."""


XID: Final = "xid"
NO_ACTION: Final = "NONE"


class KindFacts(NamedTuple):
    """Severity, sources, message and advice of an incident kind."""

    severity: Severity
    sources: str
    """The sources that detect incidents of the kind, for the documentation."""
    message: str
    action: str | None = None
    """The advised action, by NVIDIA's name."""


_EVENTS: Final = "driver events"
_READINGS: Final = "readings"
_FABRIC: Final = "readings, from Hopper"
_SLOWDOWN: Final = "readings, for `incidents.slowdown_seconds` without a break"
_AGENT: Final = "the agent"
KIND_FACTS: Final = {
    "ecc_uncorrected": KindFacts(
        Severity.CRITICAL, "driver events, readings", "Uncorrected memory error"
    ),
    "ecc_corrected_storm": KindFacts(
        Severity.WARNING, _EVENTS, "Very many corrected memory errors"
    ),
    "page_retirement_pending": KindFacts(
        Severity.WARNING,
        "driver events; before Ampere also readings",
        "A part of the memory will be replaced at the next reset",
        "RESET_GPU",
    ),
    "page_retirement_failed": KindFacts(
        Severity.CRITICAL, _EVENTS, "A part of the memory could not be replaced", "CONTACT_SUPPORT"
    ),
    "row_remap_pending": KindFacts(
        Severity.WARNING, _READINGS, "A memory row will be replaced at the next reset", "RESET_GPU"
    ),
    "row_remap_done": KindFacts(
        Severity.INFO, _READINGS, "No memory row is waiting to be replaced any longer"
    ),
    "row_remap_failed": KindFacts(
        Severity.CRITICAL, _READINGS, "A memory row could not be replaced", "CONTACT_SUPPORT"
    ),
    "poison_nonfatal": KindFacts(
        Severity.WARNING, _EVENTS, "Poisoned data was contained", "RESTART_APP"
    ),
    "poison_fatal": KindFacts(Severity.CRITICAL, _EVENTS, "Poisoned data was used", "RESET_GPU"),
    "sram_threshold_exceeded": KindFacts(
        Severity.CRITICAL,
        _READINGS,
        "The on-chip memory (SRAM) has more errors than its manufacturer allows",
        "CONTACT_SUPPORT",
    ),
    "fabric_bandwidth_degraded": KindFacts(
        Severity.WARNING, _FABRIC, "The NVLink fabric has less than its full bandwidth"
    ),
    "fabric_route_recovery": KindFacts(
        Severity.WARNING, _FABRIC, "Routes of the NVLink fabric are being recovered"
    ),
    "fabric_route_unhealthy": KindFacts(
        Severity.CRITICAL,
        _FABRIC,
        "A route of the NVLink fabric is unhealthy: jobs over NVLink fail",
    ),
    "fabric_access_timeout": KindFacts(
        Severity.WARNING,
        _FABRIC,
        "An access over the NVLink fabric timed out and is being recovered",
    ),
    "nvlink_recovery_failed": KindFacts(
        Severity.CRITICAL, "readings, from Blackwell", "An NVLink could not be recovered"
    ),
    "pcie_link_degraded": KindFacts(
        Severity.WARNING,
        "readings, for a minute in performance state 0",
        "The PCIe link is slower than the GPU and the machine support",
        "CHECK_MECHANICALS",
    ),
    "hardware_thermal_slowdown": KindFacts(
        Severity.WARNING, _SLOWDOWN, "The hardware slows the clocks down because of the temperature"
    ),
    "power_brake_slowdown": KindFacts(
        Severity.WARNING, _SLOWDOWN, "The machine's power supply slows the clocks down"
    ),
    "state_ended": KindFacts(Severity.INFO, _READINGS, "State ended"),
    "gpu_unavailable": KindFacts(Severity.CRITICAL, _EVENTS, "The GPU is not available"),
    "recovery_action": KindFacts(
        Severity.WARNING,
        "driver events, readings",
        "The recovery action that the driver requests has changed",
    ),
    "mig_changed": KindFacts(
        Severity.INFO, "driver events, the agent", "The layout of MIG instances has changed"
    ),
    "gpu_lost": KindFacts(Severity.CRITICAL, _AGENT, "The driver no longer answers for this GPU"),
    "gpu_recovered": KindFacts(Severity.INFO, _AGENT, "The driver answers for this GPU again"),
    "driver_reloaded": KindFacts(Severity.INFO, _AGENT, "The driver was reloaded"),
    "agent_ended": KindFacts(
        Severity.CRITICAL, _AGENT, "The agent ends because no GPU answers; it is then restarted"
    ),
    "driver_unbound": KindFacts(Severity.INFO, _AGENT, "The driver is being unbound from this GPU"),
}
KINDS: Final = frozenset({XID, *KIND_FACTS})
"""All incident kinds that the agent reports."""


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
    """Return an incident of one of `KINDS`; raise `KeyError` for another kind.

    `detail` is appended to the kind's message. Pass `action` and `severity` only if they differ
    from those of the kind or XID, for example if the driver itself requests an action.
    """
    known = find_xid(xid) if kind == XID and xid is not None else None
    if known:
        # For a code that is not in the catalogue, the message contains at least the code.
        words = f"{known.meaning}: {known.code}" if known.category == UNKNOWN else known.meaning
        own_severity, advice = known.severity, known.immediate
    else:
        own_severity, _, words, advice = KIND_FACTS[kind]
    asks = kind == "recovery_action" or (kind == XID and xid == RECOVERY_ACTION_CHANGED)
    if asks and action is not None:
        # The action that the driver requests determines the severity.
        own_severity = Severity.INFO if action == NO_ACTION else Severity.CRITICAL
    if kind == "recovery_action" and action is not None:
        words = f"The driver requests {'no further action' if action == NO_ACTION else action}"
    if is_at_start and ended_kinds:
        words = "State absent"
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
    """Return the possible severities of a kind's incidents; raise `KeyError` for unknown kinds."""
    if kind == XID:
        return tuple(Severity)
    own = KIND_FACTS[kind].severity
    return (Severity.INFO, own, Severity.CRITICAL) if kind == "recovery_action" else (own,)


WINDOW_NS: Final = 2 * NS_PER_SECOND
# Limits are needed because a log line may name any GPU and any code. 256 keys are enough for 32
# different XIDs on each of 8 GPUs.
_MAX_KEYS: Final = 256
_MAX_UNPAIRED: Final = 512

Key = tuple[str, int | str]
"""Identifies equal detections: the GPU's UUID, and the XID or the kind."""


class Deduplicator:
    """Detects whether two sources have reported the same event.

    It keeps a limited number of detections that only one source has reported so far.
    """

    def __init__(self) -> None:
        self._unpaired: OrderedDict[Key, dict[str, deque[int]]] = OrderedDict()

    def is_new(self, key: Key, *, source: str, time_ns: int, window_ns: int = WINDOW_NS) -> bool:
        """Record a detection; return whether it is the first detection of its event.

        It is not the first if another source has recorded a detection with the same key, at most
        `window_ns` earlier or later. The two detections are then paired, and the other one is
        forgotten, so that it is paired only once.
        """
        by_source = self._unpaired.setdefault(key, {})
        self._unpaired.move_to_end(key)
        if len(self._unpaired) > _MAX_KEYS:
            self._unpaired.popitem(last=False)
        for other, times_ns in by_source.items():
            near = (ns for ns in times_ns if abs(ns - time_ns) <= window_ns)
            if other != source and (paired_ns := next(near, None)) is not None:
                # Remove only the oldest of equal detections, so that each is paired once.
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
"""PCI domain, bus and device."""


class XidLine(NamedTuple):
    """The fields of a kernel log line that reports an XID."""

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
    """Return the fields of a kernel log line; `None` if the line does not report an XID."""
    found = _LINE.match(text)
    bus = found and read_bus(found["bus"])
    if not found or not bus:
        return None
    pid, command, words = _split(found["rest"] or "")
    xid = int(found["xid"])
    action = severity = None
    if xid == RECOVERY_ACTION_CHANGED and (matched := _NEW_ACTION.search(words)):
        action = recovery_action(int(matched[1], 16))
    # NVLink 5 uses the same codes for contained and for fatal errors.
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
    """Parse a PCI address such as `00000000:1B:00.0` or `0000:1b:00`; return `None` if invalid."""
    parts = text.partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    if len(numbers) == _BUS_PARTS - 1:
        numbers.insert(0, 0)
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == _BUS_PARTS else None


def write_bus(bus: Bus) -> str:
    """Return a PCI address in the format of the kernel log."""
    domain, number, device = bus
    return f"PCI:{domain:04x}:{number:02x}:{device:02x}"


def _split(rest: str) -> tuple[int | None, str | None, str]:
    """Split the text after an XID into the process's pid, the process's name and the other text.

    The pid and the name are `None` if they are missing or unknown.
    """
    pid = command = None
    if found := _PID.match(rest):
        pid, rest = _number(found["pid"]), rest[found.end() :]
        if named := _NAME.match(rest):
            command, rest = named["name"], rest[named.end() :]
    known = command and command != "<unknown>"
    return pid, command if known else None, rest.strip()


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
