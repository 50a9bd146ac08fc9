"""A sum over one of DCGM's memory metrics is the devices' memory, however they are shared."""

from collections.abc import Sequence

import pytest

from gpuledger.records import GpuReading
from gpuledger_agent.exposition.dcgm_fields import all_fields, default_counters
from tests.unit.agent.exposition.builders import (
    GIB,
    Node,
    Reported,
    Row,
    allocation,
    gpu,
    instance,
    inventory,
    node,
    process,
    sample,
)

MEMORY = {
    "memory_total_bytes": 80 * GIB,
    "memory_used_bytes": 48 * GIB,
    "memory_reserved_bytes": GIB,
}
SLICE = {"memory_total_bytes": 10 * GIB, "memory_used_bytes": 9 * GIB, "memory_reserved_bytes": 0}
MEMORY_FIELDS = [field.old for field in all_fields() if field.is_of_memory and field.unit == "MiB"]
OWNERS = ("ml/a/main", "ml/b/main", "ml/c/main")


def shared(*rows: Row, on: Sequence[int], **allocated: object) -> Reported:
    """Return a tick in which three containers use memory on the devices at the places `on`."""
    return sample(
        *rows,
        containers=["a", "b", "c"],
        processes=[
            process(place, container, pid=10 * place + container, memory_used_bytes=9 * GIB)
            for place in on
            for container in range(3)
        ],
        allocations=[
            allocation(0, owner, replica=str(number), **allocated)
            for number, owner in enumerate(OWNERS)
        ],
    )


SCENARIOS = {
    "one container has all of it": sample(
        gpu(0, **MEMORY),
        containers=["a"],
        processes=[process(0, 0, memory_used_bytes=47 * GIB)],
        allocations=[allocation(0, OWNERS[0])],
    ),
    "three containers share it": shared(gpu(0, **MEMORY), on=[0]),
    "three containers share it without allocations": sample(
        gpu(0, **MEMORY),
        containers=["a", "b", "c"],
        processes=[process(0, one, pid=one + 1, memory_used_bytes=16 * GIB) for one in range(3)],
    ),
    "with MIG, an instance is shared": shared(
        gpu(0, mig_enabled=True, **MEMORY),
        instance(7, **SLICE),
        instance(8, **SLICE),
        on=[1],
        gpu_instance=7,
    ),
    "with MIG, compute instances share memory": shared(
        gpu(0, mig_enabled=True, **MEMORY),
        instance(7, ci=0, **SLICE),
        instance(7, ci=1, **SLICE),
        on=[1, 2],
        gpu_instance=7,
    ),
}


def of(name: str) -> Node:
    it = node(a=OWNERS[0], b=OWNERS[1], c=OWNERS[2])
    reported = SCENARIOS[name]
    it.show(reported, inventory=inventory(0))
    return it


def memories(reported: Reported) -> list[GpuReading]:
    """Return one row for each memory: the GPU's, or those of its GPU instances."""
    gpu_itself, *instances = reported.sample.gpus
    return list({one.gpu_instance: one for one in instances}.values()) or [gpu_itself]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "field",
    sorted({counter.field.old for counter in default_counters()} & set(MEMORY_FIELDS)),
)
def test_the_sum_over_a_gpus_memory_is_at_most_the_memory_of_the_gpu(
    scenario: str, field: str
) -> None:
    it = of(scenario)
    series = it.values(field, "UUID", "GPU_I_ID", "GPU_C_ID", "pod", "gpuledger_share")
    reading = {
        "DCGM_FI_DEV_FB_USED": "memory_used_bytes",
        "DCGM_FI_DEV_FB_FREE": "memory_total_bytes",
        "DCGM_FI_DEV_FB_RESERVED": "memory_reserved_bytes",
    }[field]
    has = sum(getattr(memory, reading) for memory in memories(SCENARIOS[scenario]))
    assert series
    assert sum(series.values()) <= has / 2**20


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "MIG" not in name])
def test_used_free_and_reserved_add_up_to_the_whole_memory(scenario: str) -> None:
    it = of(scenario)
    parts = ("USED", "FREE", "RESERVED")
    found = [sum(it.values(f"DCGM_FI_DEV_FB_{part}", "pod").values()) for part in parts]
    assert sum(found) == 80 * 1024
