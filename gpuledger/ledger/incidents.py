"""By what incidents are counted: the words of the labels, and when two records are one incident.

The words are bounded: a kind is one of `INCIDENT_KINDS`, an XID one of NVIDIA's catalogue, and what
is neither is `OTHER`. Pure.
"""

import hashlib
from typing import Final

from gpuledger.records import Incident
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.xids import UNKNOWN, find_xid

OTHER: Final = "other"
COUNTED_KINDS: Final = (*INCIDENT_KINDS, OTHER)
"""The values of the label `kind`."""


def counted_kind(incident: Incident) -> str:
    """Return the value of the label `kind`."""
    return incident.kind if incident.kind in INCIDENT_KINDS else OTHER


def counted_xid(incident: Incident) -> str | None:
    """Return the value of the label `xid`; `None` where the incident is no XID."""
    if incident.xid is None:
        return None
    return OTHER if find_xid(incident.xid).category == UNKNOWN else str(incident.xid)


def incident_hash(incident: Incident) -> str:
    """Return 16 digits that are the same of what is one incident of a node.

    A source tells of nothing twice, so that one instant on one GPU (or one of its instances) has
    one of a kind and code.
    """
    identity = (
        incident.boot_id,
        incident.gpu_uuid,
        incident.gpu_instance,
        incident.compute_instance,
        incident.time_ns,
        incident.kind,
        incident.xid,
        incident.source,
        # What else may come twice at one instant: the driver's words tell them apart.
        incident.message,
    )
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
