"""reference/xids.md: the meaning of each XID in incidents."""

from typing import Final

from gpuledger.xids import all_xids
from tests.docs_gen.markdown import code, head, table

_HEAD: Final = head(
    "XIDs",
    audience="SRE",
    about="""\
Codes of GPU errors that NVIDIA's driver reports, with their meaning and the action. Look up the
code of an incident or of an alert here.""",
)
_CLASSES: Final = """
The meaning of each code in incidents of kind `xid`. Mnemonic, meaning and the two actions are from
NVIDIA's catalogue for Ampere and newer (October 2025): the immediate action, and the one that finds
the cause. Class and severity are gpuledger's interpretation. The `action` of an incident is the
immediate one, unless the driver named another. Other codes are `unknown`, with severity `warning`.

| class | action |
|---|---|
| `app` | ask the pod's owner: the program caused it (`info`), or was affected by it |
| `context` | none, because it comes with another XID; 154 matters if it names a required action |
| `detail` | none, because it adds details to an XID 48 |
| `reset` | drain the GPU and reset it |
| `node` | cordon the node and reboot it |
| `vm` | restart the virtual machine |
| `hardware`, `mechanical`, `support` | check the machine, or ask its manufacturer |
| `maintenance`, `trend` | plan maintenance, because it will become worse |
| `nvlink`, `nvlink5` | check jobs on several GPUs; 144 to 150: `critical` if the log has `Fatal` |
| `software` | check drivers and firmware |
| `info` | none |

Other sources disagree on three codes. NVIDIA requires a reset after 109, but its device plugin
ignores it. NVIDIA ignores 63, but most rules drain the node. For NVIDIA, 94 means that the affected
program restarts; in many rules it is `critical`.
"""
_COLUMNS: Final = ("XID", "mnemonic", "meaning", "at once", "then", "class", "severity")


def xids_page() -> str:
    """Return the page, in Markdown."""
    rows = (
        (
            str(xid.code),
            code(xid.mnemonic) if xid.mnemonic else "",
            xid.meaning,
            xid.immediate or "",
            xid.investigatory or "",
            code(xid.category),
            code(xid.severity.value),
        )
        for xid in all_xids()
    )
    return "\n".join([f"{_HEAD}{_CLASSES}", *table(_COLUMNS, rows), ""])
