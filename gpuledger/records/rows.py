"""One account's share of one GPU in one tick, as a flat row for SQL engines.

Here lives the record of `gpuledger.rows.v1`. It says what `gpuledger.events.v1` says, with nothing
inside anything else: names and units are those of the store's columns.
"""

from gpuledger.records.base import BaseRecord, BootId, Natural, NodeName, Seq, SmallNatural
from gpuledger.records.bounds import (
    Id,
    Label,
    Labels,
    Subdomain,
    Word,
)
from gpuledger.records.events import Account, HolderState, Method, PodState


class EntryRow(BaseRecord, frozen=True, kw_only=True):
    """An entry with its tick, GPU, pod and holder. `(node, boot_id, seq, row)` is its identity."""

    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """The tick's number within the boot, as in the event."""
    row: Natural
    """The row's number within its event, from 0."""
    time: Word
    """End of the covered interval in UTC, to the microsecond: `2026-11-21T17:04:05.250000Z`."""
    interval_seconds: float
    """Length of the covered interval; with method `accounting`, of all ticks that it settles."""
    gpu_uuid: Id
    """The GPU's or MIG instance's UUID."""
    gpu_index: SmallNatural
    """The driver's index of the GPU at this tick: a label for people, never a key."""
    model: Word | None = None
    """The product name, such as `NVIDIA H100 80GB HBM3`."""
    account: Account
    """The kind of account."""
    method: Method
    """How the busy seconds were found."""
    pod_uid: Id | None = None
    """On a pod's account: its UID, where it is known."""
    container_id: Id | None = None
    """On a pod's account: the container's id, where the cgroup path names it."""
    pod_state: PodState | None = None
    """On a pod's account: `known` by a pod record that names this node, `foreign` where the record
    names another node, `pending` where none has come. Names stand beside `known` alone."""
    container: Label | None = None
    """Name of the container, once known."""
    namespace: Label | None = None
    """The pod's namespace, once known."""
    pod: Subdomain | None = None
    """The pod's name, once known."""
    owner_kind: Word | None = None
    """Kind of the pod's workload, such as `Deployment`."""
    owner_name: Subdomain | None = None
    """Name of the pod's workload."""
    labels: Labels | None = None
    """The pod's labels that the pod watch was asked to keep."""
    busy_seconds: float | None = None
    """Time in which its kernels ran; on `idle`: in which none ran; absent without a reading. Below
    zero on `unattributed` with method `accounting`: what an account had of it after all."""
    memory_byte_seconds: float | None = None
    """Memory held times the time it was held; on `idle`: free memory; absent without a reading."""
    joules: float | None = None
    """Energy; absent on a GPU that gives neither energy nor power."""
    holder_state: HolderState | None = None
    """On `idle`: `known` where a pod of this node has the name of who held this part unused,
    `unknown` where none is known to; absent where nobody held it. Names stand beside `known`."""
    holder_uid: Id | None = None
    """On `idle`: the UID of the pod that held this part unused."""
    holder_namespace: Label | None = None
    """On `idle`: the namespace of who held this part unused."""
    holder_pod: Subdomain | None = None
    """On `idle`: the pod that held this part unused."""
    holder_container: Label | None = None
    """On `idle`: the container that held this part unused."""
    sm_active_seconds: float | None = None
    """The GPU's time with work on its multiprocessors, apportioned by busy seconds; absent on
    `idle` and without the chip's counters, as the next two."""
    tensor_active_seconds: float | None = None
    """The same of the tensor pipes."""
    dram_active_seconds: float | None = None
    """The same of the memory interface."""
    late: bool
    """Whether the node was late with the tick; the same in all rows of an event."""
    uncovered_seconds: float | None = None
    """Time right before the tick that no tick covers; in all rows of an event: count it once."""
