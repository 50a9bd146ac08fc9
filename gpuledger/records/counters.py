"""What a sink has counted of a node so far, so that its counters go on where it goes on.

Here live the records of `gpuledger.counters.v1`, a compacted topic keyed by group and node, which
a sink reads when it takes a partition over. It is the sink's own: nobody else needs to read it.
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
"""Of a node: twice what 16 GPUs of 16 containers each have, with all accounts and pods that came
and went within the time for which series are kept."""
# Bytes times nanoseconds of one GPU are beyond 64 bits within a second.
BigNatural = Annotated[str, msgspec.Meta(max_length=60, pattern=r"^[0-9]+$(?!\n)")]
MAX_QUANTITIES: Final = 16
MAX_COUNTED_WORDS: Final = 128
"""Of a GPU: more than there are kinds of incidents, or codes in NVIDIA's catalogue."""
MAX_INCIDENT_GPUS: Final = 64
"""Of a node, those that were seen last."""
UserIdent = Annotated[str, msgspec.Meta(max_length=400)]
"""An id, or the names of a namespace (63), a pod (253) and a container (63) with slashes."""
MAX_KNOWN_INCIDENTS: Final = 256
"""Of a node, those that were counted last."""
IncidentHash = Annotated[str, msgspec.Meta(max_length=16)]


class CountedBoot(ArrayRecord, frozen=True, kw_only=True):
    """How far the ticks of a boot are counted."""

    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """The number of its last tick that is counted."""


class CountedPod(ArrayRecord, frozen=True, kw_only=True):
    """A pod that has counters."""

    namespace: Label | None = None
    """Its namespace; absent where that was not known within the time that a series waits for it."""
    name: Subdomain | None = None
    """Its name, likewise."""
    uid: Id | None = None
    """Its UID, likewise."""


class CountedSeries(ArrayRecord, frozen=True, kw_only=True):
    """The counters of one category, container or job on one device."""

    gpu: Natural
    """Position of the device in the record's `gpus`."""
    category: Word
    """Whose it is: a pod's, a job's, the host's, nobody's or idle."""
    seen_time_ns: Natural
    """Time of the last tick that had anything of it."""
    amounts: Annotated[list[BigNatural | None], at_most(MAX_QUANTITIES)]
    """What was counted, in the order of the record's `quantities`; `null` where nothing was ever
    known."""
    begun_time_ns: Annotated[list[Natural | None], at_most(MAX_QUANTITIES)]
    """Where each of them began with 0, nanoseconds since the epoch."""
    pod: Natural | None = None
    """Position in the record's `pods`; absent where the category is no pod's."""
    container: Label | None = None
    """The container's name, where it is known."""
    job_id: JobId | None = None
    """The job, where the category is a job's."""


class WaitingUse(ArrayRecord, frozen=True, kw_only=True):
    """What was used by a container whose names are not known yet, and is in no counter so far."""

    gpu: Natural
    """Position of the device in the record's `gpus`."""
    ident: UserIdent
    """By what the names are found: the container's id, or what the kubelet calls it."""
    since_time_ns: Natural
    """Where its first tick begins, nanoseconds since the epoch."""
    seen_time_ns: Natural
    """Time of its last tick."""
    pod: Natural
    """Position in the record's `pods` of what is known of its pod."""
    amounts: Annotated[list[BigNatural | None], at_most(MAX_QUANTITIES)]
    """What was used, as in `CountedSeries`."""
    container: Label | None = None
    """The container's name, where it is known."""


class CountedKind(ArrayRecord, frozen=True, kw_only=True):
    """How many incidents of a kind a GPU has had."""

    kind: Word
    """The kind, or `other`."""
    total: Natural
    """Their number."""


class CountedXid(ArrayRecord, frozen=True, kw_only=True):
    """How many XIDs of a code a GPU has had."""

    xid: Word
    """The code, or `other`."""
    total: Natural
    """Their number."""
    begun_time_ns: Natural | None = None
    """Where its series began with 0, nanoseconds since the epoch; absent while it was not sent."""


class CountedIncidents(ArrayRecord, frozen=True, kw_only=True):
    """The incidents of one GPU."""

    gpu: Id
    """Its UUID, or its address on the bus where no more is known of it."""
    seen_time_ns: Natural
    """Time of the last tick that had it, or of its last incident."""
    kinds: Annotated[list[CountedKind], at_most(MAX_COUNTED_WORDS)]
    """How many of each kind there were."""
    xids: Annotated[list[CountedXid], at_most(MAX_COUNTED_WORDS)]
    """How many of each code there were."""
    begun_time_ns: Natural | None = None
    """Where the series of the kinds began with 0, nanoseconds since the epoch; absent while they
    were not sent."""


class NodeCounters(BaseRecord, frozen=True, kw_only=True):
    """The counters of a node as one group of sinks has sent them."""

    group: Word
    """The consumer group."""
    cluster: ClusterName
    """The Kubernetes cluster."""
    node: NodeName
    """The node's name in Kubernetes."""
    time_ns: Natural
    """Time of the last tick that is counted, nanoseconds since the epoch."""
    boots: Annotated[list[CountedBoot], at_most(MAX_BOOTS)]
    """How far each boot is counted, the one at work at the end."""
    gpus: Annotated[list[Id], at_most(2 * MAX_COUNTED_SERIES)]
    """The UUIDs of the devices and instances."""
    pods: Annotated[list[CountedPod], at_most(2 * MAX_COUNTED_SERIES)]
    """The pods."""
    quantities: Annotated[list[Word], at_most(MAX_QUANTITIES)]
    """The names of what is counted."""
    series: Annotated[list[CountedSeries], at_most(MAX_COUNTED_SERIES)]
    """The counters."""
    waiting: Annotated[list[WaitingUse], at_most(MAX_COUNTED_SERIES)] | None = None
    """What waits for names; absent where nothing does."""
    incidents: Annotated[list[CountedIncidents], at_most(MAX_INCIDENT_GPUS)] | None = None
    """The incidents of each GPU that has had one; absent where none has."""
    known_incidents: Annotated[list[IncidentHash], at_most(MAX_KNOWN_INCIDENTS)] | None = None
    """By what the incidents that were counted last are known again, the last one at the end; absent
    where there was none."""
