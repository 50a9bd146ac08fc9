"""What a source of incidents detected, and the incident made of it.

Whoever finds an incident comes here: the driver's events, the kernel's log, the readings, the
driver's own start and end. Here stands how severe each kind is, what to do, and the words for
people. No NVML here, and no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuledger.records import DeviceAllocation, Incident, IncidentProcess, Severity
from gpuledger.xids import RECOVERY_ACTION_CHANGED, UNKNOWN, find_xid


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """One thing that one source saw once."""

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
    "row_remap_failed": _Kind(
        Severity.CRITICAL, "A memory row could not be replaced", "CONTACT_SUPPORT"
    ),
    "poison_nonfatal": _Kind(Severity.WARNING, "Poisoned data was contained", "RESTART_APP"),
    "poison_fatal": _Kind(Severity.CRITICAL, "Poisoned data was used", "RESET_GPU"),
    "gpu_unavailable": _Kind(Severity.CRITICAL, "The GPU is not available"),
    "recovery_action": _Kind(Severity.WARNING, "What the driver needs to recover has changed"),
    "mig_changed": _Kind(Severity.INFO, "The layout of MIG instances has changed"),
    "gpu_lost": _Kind(Severity.CRITICAL, "The driver no longer answers for this GPU"),
    "gpu_recovered": _Kind(Severity.INFO, "The driver answers for this GPU again"),
    "driver_reloaded": _Kind(Severity.INFO, "The driver was loaded anew"),
    "agent_ended": _Kind(
        Severity.CRITICAL, "The agent ends to be started afresh, as nothing works any more"
    ),
    "driver_unbound": _Kind(Severity.INFO, "The driver lets go of this GPU"),
}
KINDS: Final = frozenset({XID, *_KINDS})
"""All kinds that the agent reports."""


def make_incident(
    *,
    kind: str,
    node: str,
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
    return Incident(
        node=node,
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
    )


def severities_of(kind: str) -> tuple[Severity, ...]:
    """Return the severities that incidents of one of `KINDS` may have."""
    if kind == XID:
        return tuple(Severity)
    own = _KINDS[kind].severity
    return (Severity.INFO, own, Severity.CRITICAL) if kind == "recovery_action" else (own,)
