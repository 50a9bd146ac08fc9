"""The series that are made of events: names, help, labels. Remote-write and OTLP share them.

Here lives the one table of them. A name is in one family, and a family's series are of different
things: a sum over a name counts nothing twice. So a GPU, the MIG instances into which it is cut and
the accounts on which it is booked have names of their own, and none is a name of the nodes' pages
(`gpuledger_node_gpu_…`), which one Prometheus may well scrape. Containers and accounts have a
series of each quantity of the books, averaged over the tick; what is held stands apart, by holder,
as it says nothing of use. `values_of` fills them from one event.
Whole numbers become base units here, at the edge and last: what is summed is summed in whole
numbers. Pure; nothing is remembered from one tick to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

from gpuledger.ledger.entries import NO_POD, PodIndex, PodOfEntry, slices_of
from gpuledger.ledger.quantities import APPORTIONED, BOOKED, HELD_NS, Amounts, apportion
from gpuledger.ledger.rows import ATTRIBUTES, Attribute
from gpuledger.records import Account, Entry, GpuBooks, GpuEvent, PodState


class OverInterval(Enum):
    """What a metric's value is over an interval of several ticks."""

    MEAN = "mean"
    """Its mean, and its maximum in a metric of its own."""
    SUM = "sum"
    """Its sum: what it measures is of the tick alone."""
    LAST = "last"
    """The last one."""


@dataclass(frozen=True, kw_only=True)
class FamilyMetric:
    """One metric of a family."""

    name: str
    """Its name, with the base unit at the end."""
    help: str
    """What it says, as a sentence."""
    kind: str = "gauge"
    """Its Prometheus type."""
    over_interval: OverInterval = OverInterval.MEAN
    """What it is over an interval."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Metrics with the same labels."""

    labels: tuple[str, ...]
    """Names of the labels beside `node`, in the order in which values are given."""
    metrics: tuple[FamilyMetric, ...]
    """The metrics, in the order in which values are given."""
    is_shared: bool = False
    """Whether its groups share a device, whose UUID is their first label: a tick in which one of
    them has no value, and another one has, counts as 0 in its mean, so that means sum up, too."""


_BOOKED: Final = tuple(quantity for quantity in BOOKED if not quantity.is_of_holders)
_QUANTITIES: Final = (*_BOOKED, *APPORTIONED)
"""The quantities in the order in which a group has their values."""
_GPU_LABELS: Final = ("gpu_uuid", "gpu_index")
_HOLDER_LABELS: Final = ("holder_namespace", "holder_pod", "holder_container", "holder_state")

DEVICE: Final = Family(
    labels=(*_GPU_LABELS, "model"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_utilization_ratio",
            help="Share of the tick in which at least one kernel ran.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_utilization_ratio",
            help="Share of the tick in which the memory controller was busy.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_used_bytes",
            help="Device memory in use, without what the driver reserved.",
        ),
        FamilyMetric(name="gpuledger_gpu_memory_total_bytes", help="Size of the device memory."),
        FamilyMetric(
            name="gpuledger_gpu_memory_reserved_bytes",
            help="Device memory that the driver and the firmware keep for themselves.",
        ),
        FamilyMetric(name="gpuledger_gpu_power_watts", help="Power draw."),
        FamilyMetric(
            name="gpuledger_gpu_energy_joules_total",
            help="The driver's energy counter; it starts again when the driver is loaded.",
            kind="counter",
            over_interval=OverInterval.LAST,
        ),
        FamilyMetric(name="gpuledger_gpu_temperature_celsius", help="Temperature of the die."),
        FamilyMetric(
            name="gpuledger_gpu_sm_clock_hertz", help="Clock of the streaming multiprocessors."
        ),
        FamilyMetric(name="gpuledger_gpu_memory_clock_hertz", help="Clock of the device memory."),
        FamilyMetric(
            name="gpuledger_gpu_gap_seconds",
            help="Length of the tick where the GPU did not answer, so that nothing of it is known;"
            " there is a sample in such ticks alone.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
INSTANCE: Final = Family(
    labels=(
        *_GPU_LABELS,
        "model",
        "parent_uuid",
        "gpu_instance",
        "compute_instance",
        "mig_profile",
    ),
    metrics=(
        FamilyMetric(
            name="gpuledger_mig_instance_utilization_ratio",
            help="Share of the tick in which the MIG instance's engine was busy, by the chip's own "
            "counters.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_used_bytes",
            help="The instance's memory in use, without what the driver reserved; compute "
            "instances that share one memory report it once.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_total_bytes",
            help="Size of the instance's memory, which is a part of the GPU's.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_reserved_bytes",
            help="The instance's memory that the driver and the firmware keep for themselves.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_gap_seconds",
            help="Length of the tick where the instance did not answer; there is a sample in such"
            " ticks alone.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
NODE: Final = Family(
    labels=(),
    metrics=(
        FamilyMetric(
            name="gpuledger_node_gap_seconds",
            help="Time right before the tick that no tick of the node covers; there is a sample "
            "at the first tick after such a gap alone.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
POD: Final = Family(
    labels=(
        *_GPU_LABELS,
        "namespace",
        "pod",
        "pod_uid",
        "container",
        "owner_kind",
        "owner_name",
        "busy_method",
    ),
    metrics=tuple(
        FamilyMetric(name=f"gpuledger_pod_gpu_{quantity.average}", help=quantity.pod_help)
        for quantity in _QUANTITIES
    ),
    is_shared=True,
)
ACCOUNT: Final = Family(
    labels=(*_GPU_LABELS, "account", "busy_method", *_HOLDER_LABELS),
    metrics=tuple(
        FamilyMetric(name=f"gpuledger_account_gpu_{quantity.average}", help=quantity.account_help)
        for quantity in _QUANTITIES
    ),
    is_shared=True,
)
HOLDER: Final = Family(
    labels=(*_GPU_LABELS, *_HOLDER_LABELS),
    metrics=(
        FamilyMetric(
            name=f"gpuledger_holder_gpu_{HELD_NS.average}",
            help="How much of the GPU, or of the MIG instance, the holder holds, or nobody,"
            " whatever is used of it; of each device it sums to 1, also where it does not answer.",
        ),
        FamilyMetric(
            name="gpuledger_holder_gpu_held_board_ratio",
            help="The same as a part of the whole board, by compute slices: of each board it sums"
            " to 1 over its row and those of its instances.",
        ),
    ),
    is_shared=True,
)
FAMILIES: Final = (DEVICE, INSTANCE, NODE, POD, ACCOUNT, HOLDER)
LABEL_ATTRIBUTES: Final = ATTRIBUTES | {
    "parent_uuid": ("hw.parent", Attribute.POINT),
    "gpu_instance": ("gpuledger.mig.gpu_instance", Attribute.POINT),
    "compute_instance": ("gpuledger.mig.compute_instance", Attribute.POINT),
    "mig_profile": ("gpuledger.mig.profile", Attribute.POINT),
}
"""What OpenTelemetry calls each label, and of what it is an attribute: most are columns of the flat
row, these four are of devices alone."""


class SeriesGroup(NamedTuple):
    """The series of one thing: a family and the values of its labels."""

    family: Family
    label_values: tuple[str, ...]


SeriesValues = tuple[float | None, ...]
"""The values of a group in a tick, in the order of its family's metrics; `None` where unknown."""


_Memory = tuple[str | None, int | str]
"""A memory that compute instances share: the GPU, and the GPU instance or the instance itself."""
MAX_GROUPS: Final = 16_384
"""Things of which a tick has series: twice what 16 GPUs shared by 256 have. What a node says in
40 bytes is 5 kB once its labels are written, so that a tick of these comes to 85 MB at most."""
_NO_NAMES: Final = ("", "", "", "")
_booked_amounts: Final[Callable[[Entry], Amounts]] = attrgetter(
    *(quantity.name for quantity in _BOOKED)
)


def values_of(event: GpuEvent) -> dict[SeriesGroup, SeriesValues]:
    """Return the values of each group, in the order of its family's metrics; `None` where unknown.

    Entries with the same labels, as of two containers whose names are not known yet, are summed:
    a series has one sample a tick. Raises ValueError where an entry names a holder that the event
    does not list, and where there are more than `MAX_GROUPS`.
    """
    values: dict[SeriesGroup, SeriesValues] = {}
    if event.gap_ns is not None:
        values[SeriesGroup(NODE, ())] = (event.gap_ns / 10**9,)
    pods = PodIndex(event)
    memories: set[_Memory] = set()
    interval_ns = event.interval_ns
    divisors = [quantity.divisor(interval_ns) for quantity in _QUANTITIES]
    for books in event.gpus:
        gpu = (books.reading.uuid, str(books.reading.index))
        group, found = _of_row(books, memories)
        values[group] = found
        # Nothing can be averaged over no time; what the device read stands all the same.
        if interval_ns <= 0:
            continue
        booked: dict[SeriesGroup, Amounts] = {}
        of_entries = apportion(books, interval_ns)
        method = "" if books.busy_method is None else books.busy_method.value
        for entry, apportioned in zip(books.entries, of_entries, strict=True):
            if entry.account is Account.POD:
                group = _pod_group(gpu, pods.user_of(entry), method)
            else:
                group = _account_group(entry, gpu, pods.holder_of(entry), method)
            amounts = (*_booked_amounts(entry), *apportioned)
            before = booked.setdefault(group, amounts)
            if before is not amounts:
                pairs = zip(before, amounts, strict=True)
                booked[group] = tuple(
                    [b if a is None else a if b is None else a + b for a, b in pairs]
                )
        for group, amounts in booked.items():
            # Of a list: a tuple of a generator takes a third longer, for each entry of each tick.
            values[group] = tuple(
                [
                    None if amount is None else amount / divisor
                    for amount, divisor in zip(amounts, divisors, strict=True)
                ]
            )
        values.update(_held_values(books, gpu, pods, interval_ns))
        # After each device, so that one event cannot grow without end before it is refused.
        if len(values) > MAX_GROUPS:
            raise ValueError(f"gpus: more than {MAX_GROUPS} devices and accounts have series")
    return values


def _held_values(
    books: GpuBooks, gpu: tuple[str, str], pods: PodIndex, interval_ns: int
) -> dict[SeriesGroup, SeriesValues]:
    """Return, for each who holds a part of the device, the values of `HOLDER`'s metrics."""
    held: dict[SeriesGroup, int] = {}
    for entry in books.entries:
        if entry.held_ns is not None:
            of_account = _account_group(entry, gpu, pods.holder_of(entry), "")
            names = of_account.label_values[-len(_HOLDER_LABELS) :]
            group = SeriesGroup(HOLDER, (*gpu, *names))
            held[group] = held.get(group, 0) + entry.held_ns
    slices, _, board_slices, _ = slices_of(books)
    fraction: float | None = None
    if board_slices:
        # Of a cut board nobody knows what is left where one of its instances does not say its own.
        fraction = None if slices is None else slices / board_slices
    elif books.reading.parent_uuid is None:
        # A GPU of which no slices are said is a board by itself.
        fraction = 1.0
    return {
        group: (
            held_ns / interval_ns,
            None if fraction is None else held_ns * fraction / interval_ns,
        )
        for group, held_ns in held.items()
    }


def _gap_seconds(books: GpuBooks) -> float | None:
    return None if books.gap_ns is None else books.gap_ns / 10**9


def _of_row(books: GpuBooks, memories: set[_Memory]) -> tuple[SeriesGroup, SeriesValues]:
    """Return the labels of a GPU or an instance, and what it read."""
    reading = books.reading
    if reading.parent_uuid is not None:
        return _of_instance(books, memories)
    labels = (reading.uuid, str(reading.index), reading.model or "")
    power, energy = reading.power_milliwatts, reading.energy_total_millijoules
    return SeriesGroup(DEVICE, labels), (
        reading.utilization_ratio,
        reading.memory_utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
        None if power is None else power / 1000,
        None if energy is None else energy / 1000,
        reading.temperature_celsius,
        reading.sm_clock_hertz,
        reading.memory_clock_hertz,
        _gap_seconds(books),
    )


def _account_group(
    entry: Entry, gpu: tuple[str, str], holder: PodOfEntry, method: str
) -> SeriesGroup:
    names = _NO_NAMES
    if holder is not NO_POD:
        pod = holder.described
        # Where the holder is known, its names say so: one label less to write.
        state = "" if pod.state is PodState.KNOWN else str(pod.state)
        names = (pod.namespace or "", pod.name or "", holder.container or "", state)
    return SeriesGroup(ACCOUNT, (*gpu, entry.account.value, method, *names))


def _pod_group(gpu: tuple[str, str], user: PodOfEntry, method: str) -> SeriesGroup:
    pod = user.described
    names = (pod.namespace, pod.name, pod.uid, user.container, pod.owner_kind, pod.owner_name)
    return SeriesGroup(POD, (*gpu, *(name or "" for name in names), method))


def _of_instance(books: GpuBooks, memories: set[_Memory]) -> tuple[SeriesGroup, SeriesValues]:
    """Return an instance's labels and values; a memory is told once and then is in `memories`."""
    reading, gap_seconds = books.reading, _gap_seconds(books)
    numbers = (reading.gpu_instance, reading.compute_instance)
    labels = (
        reading.uuid,
        str(reading.index),
        reading.model or "",
        reading.parent_uuid or "",
        *("" if number is None else str(number) for number in numbers),
        reading.mig_profile or "",
    )
    instance = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
    memory = (reading.parent_uuid, instance)
    # Compute instances of one GPU instance share its memory: told of each, a sum would count it
    # as often as there are.
    if memory in memories or reading.memory_total_bytes is None:
        return SeriesGroup(INSTANCE, labels), (
            reading.utilization_ratio,
            None,
            None,
            None,
            gap_seconds,
        )
    memories.add(memory)
    return SeriesGroup(INSTANCE, labels), (
        reading.utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
        gap_seconds,
    )
