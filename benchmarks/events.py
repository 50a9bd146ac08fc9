"""Events as the join produces them: 8 GPUs, each with two containers, the host and idle.

Data for benchmarks only; nothing is measured here.
"""

from typing import Final

from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import (
    BusyMethod,
    Category,
    EnergyMethod,
    Entry,
    EventContainer,
    GpuBooks,
    GpuEvent,
    GpuReading,
    MemoryMethod,
    PodDescription,
    PodState,
)

GPUS: Final = 8
CONTAINERS_A_GPU: Final = 2
ENTRIES: Final = GPUS * (CONTAINERS_A_GPU + 2)
NODE: Final = "gpu-node-0017.cluster.example"
START_NS: Final = 1_790_000_000_000_000_000


def booked(tick: int, *, node: str = NODE, start_ns: int = START_NS) -> GpuEvent:
    """Return a node's tick, booked."""
    pods = [_pod(number) for number in range(GPUS * CONTAINERS_A_GPU)]
    return GpuEvent(
        cluster="default",
        node=node,
        boot_id="0f2f3c1e-5a86-4a0a-9a52-8d3b0a6d3f11",
        seq=1000 * (tick + 1),
        time_ns=start_ns + tick * NS_PER_SECOND,
        interval_ns=NS_PER_SECOND,
        gpus=[_books(number, tick) for number in range(GPUS)],
        containers=[
            EventContainer(container_id=f"{one:064x}", pod=one, name="trainer")
            for one in range(GPUS * CONTAINERS_A_GPU)
        ],
        pods=pods,
        allocations=[],
    )


def _books(number: int, tick: int) -> GpuBooks:
    thousandths = (tick * 37 + number) % 1000
    entry = Entry(
        category=Category.IDLE,
        busy_ns=(1000 - thousandths) * 1_000_000,
        memory_bytes=2**34 + tick,
        energy_millijoules=90_000 + thousandths,
    )
    containers = range(number * CONTAINERS_A_GPU, (number + 1) * CONTAINERS_A_GPU)
    booked = [replace(entry, category=Category.POD, container=one) for one in containers]
    reading = GpuReading(
        uuid=f"GPU-{number:08d}-2222-3333-4444-555555555555",
        index=number,
        model="NVIDIA H100 80GB HBM3",
        utilization_ratio=thousandths / 1000,
        memory_utilization_ratio=thousandths / 2000,
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=20 * 2**30 + tick,
        memory_reserved_bytes=600 * 2**20,
        power_milliwatts=350_500 + thousandths,
        energy_total_millijoules=10**12 + 350_000 * tick,
        temperature_celsius=61,
        sm_clock_hertz=1_980_000_000,
        memory_clock_hertz=2_619_000_000,
    )
    host = replace(entry, category=Category.HOST)
    return GpuBooks(
        reading=reading,
        entries=[*booked, host, entry],
        busy_method=BusyMethod.PROCESS_UTILIZATION,
        memory_method=MemoryMethod.MEASURED,
        energy_method=EnergyMethod.COUNTER,
    )


def _pod(number: int) -> PodDescription:
    return PodDescription(
        uid=f"uid-{number}",
        state=PodState.KNOWN,
        namespace=f"research-{number % 5}",
        name=f"train-{number}-7c9d8f6b5-x2x4z",
        owner_kind="Deployment",
        owner_name=f"train-{number}",
    )
