"""The driver's line about an XID in the kernel's log, in all shapes that drivers write. Pure."""

import re
from typing import Final, NamedTuple

from gpuledger.records import Severity
from gpuledger.xids import RECOVERY_ACTION_CHANGED, recovery_action

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
    """What the line says."""

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
    return XidLine(
        bus=bus,
        xid=xid,
        gpu_instance=_number(found["gpu_instance"]),
        compute_instance=_number(found["compute_instance"]),
        pid=pid,
        command=command,
        words=words,
        action=_action(xid, words),
        severity=_severity(xid, words),
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
    """Take the process off the line's words; a driver that knows none writes `<unknown>`."""
    pid = command = None
    if found := _PID.match(rest):
        pid, rest = _number(found["pid"]), rest[found.end() :]
        if named := _NAME.match(rest):
            command, rest = named["name"], rest[named.end() :]
    known = command and command != "<unknown>"
    return pid, command if known else None, rest.strip()


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _action(xid: int, words: str) -> str | None:
    found = _NEW_ACTION.search(words) if xid == RECOVERY_ACTION_CHANGED else None
    return recovery_action(int(found[1], 16)) if found else None


def _severity(xid: int, words: str) -> Severity | None:
    return Severity.CRITICAL if xid in _NVLINK_5 and _FATAL.search(words) else None
