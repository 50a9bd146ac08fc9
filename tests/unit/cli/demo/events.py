"""Builders of events for the demo's tests."""

from collections.abc import Sequence

from gpuledger.records import (
    AttributedIncident,
    BusyMethod,
    Category,
    Entry,
    EventAllocation,
    EventContainer,
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
HELD = EventAllocation(pod=1, container="jupyter", resources=["nvidia.com/gpu"])
"""An allocation for `event`: of the pod `NOTEBOOK`, which the event then describes."""


def entry(
    category: Category,
    busy_seconds: float,
    *,
    gib: float = 0.0,
    joules: float = 0.0,
    allocation: int | None = None,
    allocated_seconds: float = 1.0,
) -> Entry:
    """Return an entry of a one-second tick; of category pod it is of the pod described above."""
    of_pod = category is Category.POD
    return Entry(
        category=category,
        container=0 if of_pod else None,
        busy_ns=round(busy_seconds * SECOND_NS),
        memory_bytes=round(gib * GIB),
        energy_millijoules=round(joules * 1000),
        allocation=allocation,
        allocated_ns=round(allocated_seconds * SECOND_NS) if category is Category.IDLE else None,
    )


def uuid_of(index: int) -> str:
    """Return a GPU's UUID: GPU-a is the first one."""
    return f"GPU-{chr(ord('a') + index)}"


def incident(
    kind: str, *, second: float, gpu: int = 0, xid: int | None = None, node: str = "node-a"
) -> AttributedIncident:
    """Return an incident of a GPU."""
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
    allocations: list[EventAllocation] | None = None,
    gpus: Sequence[int] = (0,),
    unresponsive: Sequence[int] = (),
    notebook: PodDescription = NOTEBOOK,
    method: BusyMethod = BusyMethod.EXCLUSIVE,
) -> GpuEvent:
    """Return the event of the second that ends at `second`: by default one GPU, a quarter used.

    Unresponsive GPUs have the first of the allocations, whose pod is `notebook`.
    """
    lost = [
        GpuBooks(
            reading=GpuReading(uuid=uuid_of(index), index=index, unresponsive=True),
            entries=[
                Entry(
                    category=Category.IDLE,
                    allocation=0 if allocations else None,
                    allocated_ns=SECOND_NS,
                )
            ],
        )
        for index in unresponsive
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
                    entry(Category.POD, 0.25, gib=20, joules=50.0),
                    entry(Category.IDLE, 0.75, gib=60, joules=150.0),
                ],
                busy_method=method,
            )
            for index in gpus
        ]
        + lost,
        pods=([KNOWN] if pods is None else pods) + ([notebook] if allocations else []),
        containers=[EventContainer(container_id=CONTAINER_ID, pod=0)],
        allocations=allocations or [],
    )
