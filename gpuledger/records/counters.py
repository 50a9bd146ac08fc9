"""A sink's counters of a node, saved so that they continue after the sink restarts.

This module holds the records of `gpuledger.counters.v1`, a compacted topic keyed by group and node.
A sink reads it when it takes over a partition. No other component needs to read it.
"""

from typing import Annotated, Final

import msgspec

from gpuledger.records.base import (
    ArrayRecord,
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    Seq,
)
from gpuledger.records.bounds import (
    MAX_BOOTS,
    Id,
    JobId,
    Label,
    Subdomain,
    Word,
    at_most,
)

MAX_COUNTED_SERIES: Final = 4_096
"""Series per node: twice as many as 16 GPUs with 16 containers each have, including all categories
and the pods that came and went while their series are kept."""
# The product of a GPU's bytes and nanoseconds exceeds 64 bits within a second.
BigNatural = Annotated[str, msgspec.Meta(max_length=60, pattern=r"^[0-9]+$(?!\n)")]
MAX_QUANTITIES: Final = 16
MAX_COUNTED_WORDS: Final = 128
"""Per GPU: more than there are kinds of incidents, or codes in NVIDIA's catalogue."""
MAX_INCIDENT_GPUS: Final = 64
"""Per node: those seen most recently."""
UserIdent = Annotated[str, msgspec.Meta(max_length=400)]
"""An id, or the names of a namespace (63), a pod (253) and a container (63), joined by slashes."""
MAX_KNOWN_INCIDENTS: Final = 256
"""Per node: those counted most recently."""
IncidentHash = Annotated[str, msgspec.Meta(max_length=16)]


class CountedBoot(ArrayRecord, frozen=True, kw_only=True):
    """The last counted sample of a boot."""

    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """Number of the boot's last counted sample."""


class CountedPod(ArrayRecord, frozen=True, kw_only=True):
    """A pod that has counters."""

    namespace: Label | None = None
    """Its namespace; absent if it did not become known while the series waited for it."""
    name: Subdomain | None = None
    """Its name; absent for the same reason."""
    uid: Id | None = None
    """Its UID; absent for the same reason."""


class CountedSeries(ArrayRecord, frozen=True, kw_only=True):
    """The counters of one category, container or job on one device."""

    gpu: Natural
    """Position of the device in the record's `gpus`."""
    category: Word
    """Category of the use: `pod`, `job`, `host`, `unattributed` or `idle`."""
    seen_time_ns: Natural
    """Time of the last sample in which it appeared."""
    amounts: Annotated[list[BigNatural | None], at_most(MAX_QUANTITIES)]
    """Counter values, in the order of the record's `quantities`; `null` if the value was never
    known."""
    begun_time_ns: Annotated[list[Natural | None], at_most(MAX_QUANTITIES)]
    """When each counter started from 0, nanoseconds since the epoch."""
    pod: Natural | None = None
    """Position in the record's `pods`; absent if the category is not `pod`."""
    container: Label | None = None
    """Name of the container, if known."""
    job_id: JobId | None = None
    """The job, if the category is `job`."""


class WaitingUse(ArrayRecord, frozen=True, kw_only=True):
    """Use by a container whose names are still unknown; no counter includes this use yet."""

    gpu: Natural
    """Position of the device in the record's `gpus`."""
    ident: UserIdent
    """Key for looking up the names: a container id, a pod UID or `namespace/pod/container`."""
    since_time_ns: Natural
    """Start of its first sample, nanoseconds since the epoch."""
    seen_time_ns: Natural
    """Time of its last sample."""
    pod: Natural
    """Position of its pod in the record's `pods`; names of that pod may be absent."""
    amounts: Annotated[list[BigNatural | None], at_most(MAX_QUANTITIES)]
    """Amounts used, as in `CountedSeries`."""
    container: Label | None = None
    """Name of the container, if known."""


class CountedKind(ArrayRecord, frozen=True, kw_only=True):
    """Number of incidents of one kind on a GPU."""

    kind: Word
    """The kind, or `other`."""
    total: Natural
    """Their number."""


class CountedXid(ArrayRecord, frozen=True, kw_only=True):
    """Number of XIDs of one code on a GPU."""

    xid: Word
    """The code, or `other`."""
    total: Natural
    """Their number."""
    begun_time_ns: Natural | None = None
    """When its series started from 0, nanoseconds since the epoch; absent until it is sent."""


class CountedIncidents(ArrayRecord, frozen=True, kw_only=True):
    """The incidents of one GPU."""

    gpu: Id
    """UUID of the GPU, or its bus address if nothing more is known."""
    seen_time_ns: Natural
    """Time of its last sample or its last incident."""
    kinds: Annotated[list[CountedKind], at_most(MAX_COUNTED_WORDS)]
    """Number of incidents of each kind."""
    xids: Annotated[list[CountedXid], at_most(MAX_COUNTED_WORDS)]
    """Number of XIDs of each code."""
    begun_time_ns: Natural | None = None
    """When the series of the kinds started from 0, nanoseconds since the epoch; absent until they
    are sent."""


class NodeCounters(BaseRecord, frozen=True, kw_only=True):
    """The counters of a node that the sinks of one consumer group send."""

    group: Word
    """The consumer group."""
    cluster: ClusterName
    """The Kubernetes cluster."""
    node: NodeName
    """The node's name in Kubernetes."""
    time_ns: Natural
    """Time of the last counted sample, nanoseconds since the epoch."""
    boots: Annotated[list[CountedBoot], at_most(MAX_BOOTS)]
    """The last counted sample of each boot; the current boot is the last item."""
    gpus: Annotated[list[Id], at_most(2 * MAX_COUNTED_SERIES)]
    """The UUIDs of the devices and instances."""
    pods: Annotated[list[CountedPod], at_most(2 * MAX_COUNTED_SERIES)]
    """The pods."""
    quantities: Annotated[list[Word], at_most(MAX_QUANTITIES)]
    """Names of the counted quantities."""
    series: Annotated[list[CountedSeries], at_most(MAX_COUNTED_SERIES)]
    """The counters."""
    waiting: Annotated[list[WaitingUse], at_most(MAX_COUNTED_SERIES)] | None = None
    """Use that waits for names; absent if there is none."""
    incidents: Annotated[list[CountedIncidents], at_most(MAX_INCIDENT_GPUS)] | None = None
    """Incidents of each GPU; absent if there are none."""
    next_offset: Natural | None = None
    """The offset in the node's partition of events that was committed with this record; absent if
    no such offset was committed."""
    known_incidents: Annotated[list[IncidentHash], at_most(MAX_KNOWN_INCIDENTS)] | None = None
    """Hashes by which the most recently counted incidents are recognized, the latest last; absent
    if there are none."""
