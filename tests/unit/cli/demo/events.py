"""Builders of events for the demo's tests."""

from collections.abc import Sequence

from gpuledger.records import (
    Account,
    AttributedIncident,
    BusyMethod,
    Entry,
    EventContainer,
    EventHolder,
    GpuBooks,
    GpuEvent,
    GpuReading,
    Incident,
    PodDescription,
    PodState,
    Severity,
)

GIB = 2**30
SECOND_NS = 10**9
CONTAINER_ID = "c" * 64

KNOWN = PodDescription(
    uid="uid-1",
    state=PodState.KNOWN,
    namespace="research",
    name="train-0",
    owner_kind="Job",
    owner_name="train",
)
PENDING = PodDescription(uid="uid-1", state=PodState.PENDING)

NOTEBOOK = PodDescription(
    uid="uid-notebook-0", state=PodState.KNOWN, namespace="research", name="notebook-0"
)
HELD = EventHolder(pod=1, container="jupyter", resources=["nvidia.com/gpu"])
"""Holds what `event` is told that is held: of the pod `NOTEBOOK`, which it then describes."""


def entry(
    account: Account,
    busy_seconds: float,
    *,
    gib: float = 0.0,
    joules: float = 0.0,
    holder: int | None = None,
    held_seconds: float = 1.0,
) -> Entry:
    """Return an entry of a one-second tick; on a pod's account it is of the pod described above."""
    of_pod = account is Account.POD
    return Entry(
        account=account,
        container=0 if of_pod else None,
        busy_ns=round(busy_seconds * SECOND_NS),
        memory_bytes=round(gib * GIB),
        energy_millijoules=round(joules * 1000),
        holder=holder,
        held_ns=round(held_seconds * SECOND_NS) if account is Account.IDLE else None,
    )


def uuid_of(index: int) -> str:
    """Return a GPU's UUID: GPU-a is the first one."""
    return f"GPU-{chr(ord('a') + index)}"


def incident(
    kind: str, *, second: float, gpu: int = 0, xid: int | None = None, node: str = "node-a"
) -> AttributedIncident:
    """Return something that happened to a GPU."""
    return AttributedIncident(
        incident=Incident(
            cluster="default",
            node=node,
            boot_id="boot",
            gpu_uuid=uuid_of(gpu),
            gpu_index=gpu,
            time_ns=round(second * SECOND_NS),
            kind=kind,
            source="agent",
            severity=Severity.CRITICAL,
            xid=xid,
            message="It happened",
            processes=[],
        ),
        pods=[],
    )


def event(
    *,
    second: float = 1,
    node: str = "node-a",
    entries: list[Entry] | None = None,
    pods: list[PodDescription] | None = None,
    holders: list[EventHolder] | None = None,
    gpus: Sequence[int] = (0,),
    silent: Sequence[int] = (),
    notebook: PodDescription = NOTEBOOK,
    method: BusyMethod = BusyMethod.EXCLUSIVE,
) -> GpuEvent:
    """Return the event of the second that ends at `second`: by default one GPU, a quarter used.

    GPUs that are silent are held by the first of the holders, whose pod is `notebook`.
    """
    lost = [
        GpuBooks(
            reading=GpuReading(uuid=uuid_of(index), index=index, silent=True),
            entries=[Entry(account=Account.IDLE, holder=0 if holders else None, held_ns=SECOND_NS)],
        )
        for index in silent
    ]
    return GpuEvent(
        cluster="default",
        node=node,
        boot_id="boot",
        seq=round(second * 1000),
        time_ns=round(second * SECOND_NS),
        interval_ns=SECOND_NS,
        gpus=[
            GpuBooks(
                reading=GpuReading(
                    uuid=uuid_of(index),
                    index=index,
                    memory_total_bytes=80 * GIB,
                    energy_millijoules=200_000,
                ),
                entries=entries
                or [
                    entry(Account.POD, 0.25, gib=20, joules=50.0),
                    entry(Account.IDLE, 0.75, gib=60, joules=150.0),
                ],
                busy_method=method,
            )
            for index in gpus
        ]
        + lost,
        pods=([KNOWN] if pods is None else pods) + ([notebook] if holders else []),
        containers=[EventContainer(container_id=CONTAINER_ID, pod=0)],
        holders=holders or [],
    )
