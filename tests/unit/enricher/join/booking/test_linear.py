"""The cost of a tick is proportional to its length, whatever it contains: counted, not timed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typing_extensions import override

from gpuledger.ledger.allocated_parts import MAX_ENTRIES, TooManyEntriesError, find_allocated_parts
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuReading,
    NodeSample,
    PodRecord,
    PodState,
)
from gpuledger_enricher.join.booking.books import book_tick, energy_by_row, exclusive_readings
from gpuledger_enricher.join.booking.late_adjustments import adjust_ends
from gpuledger_enricher.join.pods.describe import EventPods, attribute_incident, identity_of
from gpuledger_enricher.join.pods.pods import PodCache
from tests.unit.enricher.join.incidents import incident
from tests.unit.enricher.join.ticks import GIB, pod, process, process_end, reading, sample

FEW, MANY = 100, 400
_reads = 0


class Name(str):
    """A text that counts how often it is compared."""

    __slots__ = ()

    @override
    def __eq__(self, other: object) -> bool:
        global _reads  # noqa: PLW0603  # counted wherever it is read
        _reads += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


class Counted:
    """A record that counts how often its fields are read."""

    def __init__(self, record: object) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any field
        global _reads  # noqa: PLW0603  # counted wherever it is read
        _reads += 1
        value = getattr(self._record, name)
        return Name(value) if type(value) is str else value


@pytest.fixture(autouse=True)
def _counting() -> Iterator[None]:
    global _reads  # noqa: PLW0603  # each test counts from the start
    _reads = 0
    yield
    _reads = 0


def instance(number: int, **changes: object) -> GpuReading:
    values: dict[str, object] = {
        "uuid": f"MIG-00000000-0000-4000-8000-{number:012x}",
        "parent_uuid": "GPU-a",
        "gpu_instance": number,
        "memory_total_bytes": GIB,
        "mig_profile": "1g.10gb",
    }
    return reading(**(values | changes))


def allocation(number: int, **changes: object) -> DeviceAllocation:
    values: dict[str, object] = {
        "gpu_uuid": "GPU-a",
        "device_id": str(number),
        "resource_name": "nvidia.com/gpu",
        "namespace": "research",
        "pod": f"train-{number}",
        "container": "main",
        "gpu_instance": number,
    }
    return DeviceAllocation(**(values | changes))  # type: ignore[arg-type]  # the names are its own


def of_instances(count: int, **changes: object) -> NodeSample:
    return sample(gpus=[reading(), *(instance(number, **changes) for number in range(count))])


def allocated(count: int, **changes: object) -> NodeSample:
    ticks = of_instances(count)
    allocations = [allocation(number, **changes) for number in range(count)]
    return sample(gpus=ticks.gpus, allocations=allocations)


TICKS: dict[str, Callable[[int], NodeSample]] = {
    "instances": of_instances,
    "compute instances of one GPU instance": lambda count: of_instances(count, gpu_instance=1),
    "instances without a number": lambda count: of_instances(count, gpu_instance=None),
    "rows that are their own parents": lambda count: of_instances(count, uuid="GPU-a"),
    "GPUs of one UUID": lambda count: sample(gpus=[reading() for _ in range(count)]),
    "an allocation for each instance": allocated,
    "allocations of one container that match no row": lambda count: allocated(
        count, gpu_instance=10**6
    ),
    "allocations by UUID, and as many by a number without a row": lambda count: allocated(
        count, device_id=instance(0).uuid
    ),
    "replicas of one GPU": lambda count: sample(
        allocations=[allocation(number, gpu_instance=None) for number in range(count)]
    ),
    "processes": lambda count: sample(
        containers=[ContainerRef(pod_uid=str(number)) for number in range(count)],
        processes=[process(pid=number, container=number) for number in range(count)],
    ),
    "processes that ended": lambda count: sample(
        ended_processes=[process_end(pid=number) for number in range(count)]
    ),
}


def counted(tick: NodeSample) -> NodeSample:
    """Return the tick with rows, allocations and processes that count how often they are read."""
    wrapped: Any = Counted(tick)
    wrapped.gpus = [Counted(gpu) for gpu in tick.gpus]
    wrapped.allocations = [Counted(each) for each in tick.allocations]
    wrapped.containers = [Counted(container) for container in tick.containers]
    wrapped.processes = [Counted(each) for each in tick.processes]
    ended = tick.ended_processes
    wrapped.ended_processes = None if ended is None else [Counted(each) for each in ended]
    found: NodeSample = wrapped
    return found


def work(tick: NodeSample) -> int:
    before = _reads
    wrapped = counted(tick)
    exclusive_readings(wrapped.gpus, [[] for _ in tick.gpus])
    energy_by_row(wrapped.gpus, wrapped.interval_ns)
    find_allocated_parts(wrapped)
    adjust_ends(wrapped)
    list(imbalances(book_tick(wrapped), wrapped.interval_ns))
    message = EventPods(PodCache(), node="node-a", time_ns=0)
    message.add_users(map(identity_of, wrapped.containers), foreign=())
    message.add_allocations(wrapped.allocations)
    message.descriptions()
    return _reads - before


@pytest.mark.parametrize("make", TICKS.values(), ids=TICKS)
def test_a_tick_that_is_four_times_as_long_costs_about_four_times_as_much(
    make: Callable[[int], NodeSample],
) -> None:
    few, many = work(make(FEW)), work(make(MANY))
    assert many <= 1.5 * few * MANY / FEW


def test_more_idle_allocatees_than_a_message_can_hold_are_refused_before_they_are_built() -> None:
    """Each compute instance of a GPU instance may be allocated to any number of containers."""
    rows = of_instances(2_000, gpu_instance=1).gpus
    allocations = [allocation(number, gpu_instance=1) for number in range(2_000)]
    tick = sample(gpus=rows, allocations=allocations)
    with pytest.raises(TooManyEntriesError, match=str(MAX_ENTRIES)):
        book_tick(tick)


class CountedPods(PodCache):
    """Counts how often the pods of a node are iterated."""

    rounds = 0

    @override
    def named_on(self, node: str) -> Any:  # as in the cache
        self.rounds += 1
        return super().named_on(node)


def test_the_allocatees_of_an_incident_are_looked_up_in_one_pass_over_the_nodes_pods() -> None:
    pods = CountedPods()
    for number in range(8):
        record: PodRecord = pod(number)
        pods.put(record, partition=0)
    allocations = [allocation(number) for number in range(FEW)]
    found = attribute_incident(incident(processes=[], allocations=allocations), pods).pods
    assert pods.rounds == 1
    assert [each.name for each in found if each.state is PodState.KNOWN] == [
        f"train-{number}" for number in range(8)
    ]
