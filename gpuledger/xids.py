"""The driver's XIDs: the meaning of each code, NVIDIA's advice, and our severity.

This module looks codes up in `xids.tsv`, which follows NVIDIA's catalogue for Ampere and newer.
Category and severity are this project's own interpretation.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from gpuledger.records import Severity

UNKNOWN: Final = "unknown"
RECOVERY_ACTION_CHANGED: Final = 154
"""The XID that reports a recovery action, which takes precedence over the catalogue's action."""
_ABSENT: Final = "-"
_FILE: Final = Path(__file__).with_name("xids.tsv")
_RECOVERY_ACTIONS: Final = {
    0: "NONE",
    1: "RESET_GPU",
    2: "RESTART_BM",
    3: "DRAIN_P2P",
    4: "DRAIN_AND_RESET",
    5: "RECOVER_IMEX_DOMAIN",
    6: "BUS_RESET",
    7: "RESTART_BM",
}
_RECOVERY_NAMES: Final = {"none": "NONE", "reset": "RESET_GPU", "reboot": "RESTART_BM"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """The catalogue's entry for one code."""

    code: int
    """The code."""
    mnemonic: str | None = None
    """NVIDIA's name for the code."""
    meaning: str = "XID that is not in the catalogue"
    """NVIDIA's description."""
    immediate: str | None = None
    """NVIDIA's immediate action, such as `RESET_GPU`."""
    investigatory: str | None = None
    """NVIDIA's action for finding the cause."""
    category: str = UNKNOWN
    """Class of the code: `app`, `context`, `detail`, `hardware`, `info`, `maintenance`,
    `mechanical`, `node`, `nvlink`, `nvlink5`, `reset`, `software`, `support`, `trend`, `vm` or
    `unknown`."""
    severity: Severity = Severity.WARNING
    """Severity of an incident with this code, if nothing else is known about the incident."""


def find_xid(code: int) -> Xid:
    """Return the catalogue's entry for a code; an unlisted code is `unknown` and a warning."""
    return _catalogue().get(code) or Xid(code=code)


def all_xids() -> list[Xid]:
    """Return all entries of the catalogue, in order of their codes."""
    return list(_catalogue().values())


def recovery_action(named: int | str) -> str:
    """Return NVIDIA's name for a recovery action, from its number or its name in `GpuHealth`."""
    if isinstance(named, int):
        return _RECOVERY_ACTIONS.get(named, f"RECOVERY_ACTION_{named}")
    return _RECOVERY_NAMES.get(named, named.upper())


@cache
def _catalogue() -> dict[int, Xid]:
    # Read on the first XID, because most nodes never see one.
    _, *lines = _FILE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return {
        int(code): Xid(
            code=int(code),
            mnemonic=mnemonic,
            meaning=meaning,
            immediate=None if immediate == _ABSENT else immediate,
            investigatory=None if investigatory == _ABSENT else investigatory,
            category=category,
            severity=Severity(severity),
        )
        for code, mnemonic, meaning, immediate, investigatory, category, severity in rows
    }
