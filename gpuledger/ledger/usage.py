"""The amounts that a tick adds to the usage counters of devices, categories, containers and jobs.

The table of counters (`COUNTERS`) is made from the booked quantities; `used_in` yields by how much
an event increases each counter. A quantity that is a level over the tick, such as memory, is
counted as the amount times the interval. Time is counted as time of the physical GPU: a MIG
instance counts as its part of the GPU, by compute slices, so that a sum over devices is GPU-hours
as in bills. The time of an instance whose part is unknown is not counted.

All amounts are whole numbers. A series belongs to a device and a category, and to a pod's container
by UID and name or to a job by its id; these labels never change while the series lives. If a
container's names are not known yet, its use is not counted under other names. Instead, the use is
yielded with the key for looking up the names (`Unnamed`), and the caller keeps it until the names
are known.

The counter of `unattributed` never falls, even if a late adjustment moves busy time from it to a
container; the moved time is counted in a separate series. Idle time has no user. An idle entry's
allocated time counts for the container or job to which that part of the device is allocated, and so
do its idle time and energy, as unused. The series of a device add up exactly to its entries, and
those of all devices of a physical GPU to the time of the GPU. This module does no I/O.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from gpuledger.ledger.entries import (
    GPU_UNITS,
    PodIndex,
    PodOfEntry,
    allocated_job_of,
    digest_of_described,
    gpu_of,
    gpu_units_of,
    job_of,
    shared,
)
from gpuledger.ledger.families import (
    ACCOUNT,
    POD,
    QUANTITIES_OF_USERS,
    AllocationLabels,
    Family,
    FamilyMetric,
)
from gpuledger.ledger.interval_values import maxima_of
from gpuledger.ledger.quantities import ALLOCATED_NS, BOOKED, BUSY_NS, Quantity
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.records import Category, Entry, GpuEvent, PodState

_NS_PER_SECOND: Final = 10**9


def _is_time(quantity: Quantity) -> bool:
    """Return whether a quantity is counted in units of a nanosecond of a physical GPU."""
    return quantity.unit == "ns"


def counted_name(quantity: Quantity) -> str:
    """Return the name of a booked quantity in `COUNTED`."""
    return f"{quantity.name.removesuffix('_ns')}_units" if _is_time(quantity) else quantity.name


UNKNOWN: Final = "unknown"
"""The category of allocated time if it is unknown to whom the device was allocated. Entries do not
have this category."""
UNUSED: Final = "unused_units"
"""Idle time of the part of a device that is allocated to a container or job."""
UNUSED_ENERGY: Final = "unused_energy_millijoules"
"""Energy of this part in its idle time."""
SETTLED: Final = "settled_busy_units"
"""Busy time that late adjustments have moved away from `unattributed`."""
COUNTED: Final = (*map(counted_name, BOOKED), UNUSED, UNUSED_ENERGY, SETTLED)
"""Names of the counted quantities, in the order of `UsedAmounts`. Times are in units: a nanosecond
of a physical GPU has `GPU_UNITS`."""
_UNUSED_INDEX: Final = COUNTED.index(UNUSED)
_UNUSED_ENERGY_INDEX: Final = COUNTED.index(UNUSED_ENERGY)
_SETTLED_INDEX: Final = COUNTED.index(SETTLED)
_BUSY_INDEX: Final = BOOKED.index(BUSY_NS)
_ALLOCATED_INDEX: Final = BOOKED.index(ALLOCATED_NS)
_ENERGY_INDEX: Final = COUNTED.index("energy_millijoules")
_NOTHING: Final = (None,) * len(COUNTED)
_ALLOCATEES: Final = frozenset({Category.POD.value, Category.JOB.value})
"""The categories of users to which devices are allocated."""


def _units_per_base(quantity: Quantity) -> int:
    """Return the divisor that converts a counter's whole number to the base unit of its series."""
    by_time = _NS_PER_SECOND if quantity.is_gauge else GPU_UNITS if _is_time(quantity) else 1
    return quantity.units_per_base * by_time


_TIME_DIVISOR: Final = _NS_PER_SECOND * GPU_UNITS
_DIVISORS: Final = (
    *map(_units_per_base, BOOKED),
    _TIME_DIVISOR,
    BOOKED[_ENERGY_INDEX].units_per_base,
    _TIME_DIVISOR,
)
COUNTERS: Final = Family(
    labels=("gpu_uuid", "category", "namespace", "pod", "pod_uid", "container", "job_id"),
    metrics=(
        *(
            FamilyMetric(
                name=f"gpuledger_gpu_{quantity.total_name}",
                help=quantity.total_help,
                kind="counter",
            )
            for quantity in BOOKED
        ),
        FamilyMetric(
            name="gpuledger_gpu_unused_seconds_total",
            help="Total time for which the GPU was allocated to the container or job and no kernel"
            " ran; absent if the driver does not report use.",
            kind="counter",
        ),
        FamilyMetric(
            name="gpuledger_gpu_unused_energy_joules_total",
            help="Total energy that the GPU used while it was allocated to the container or job and"
            " no kernel ran.",
            kind="counter",
        ),
        FamilyMetric(
            name="gpuledger_gpu_late_adjustment_busy_seconds_total",
            help="Busy time counted as unattributed that late adjustments also counted on"
            " containers after they ended. Both series include it.",
            kind="counter",
        ),
    ),
)

UsedAmounts = list[int | None]
"""One amount for each name of `COUNTED`; `None` if unknown."""


class CountedLabels(NamedTuple):
    """The label values of a counter in `COUNTERS`, which identify its owner."""

    gpu_uuid: str
    category: str
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    job_id: str = ""

    @property
    def group(self) -> SeriesGroup:
        """Return the group of the counters with these labels."""
        return SeriesGroup(COUNTERS, self)


class Unnamed(NamedTuple):
    """A container on a device whose names are not all known yet."""

    gpu_uuid: str
    ident: str
    """Key for looking up its names: a container id, a pod UID or `namespace/pod/container`."""


@dataclass(frozen=True, eq=False, slots=True)
class User:
    """A container, job or category to which use of a device is attributed.

    Two users are equal only if they are the same object.
    """

    labels: CountedLabels
    """The user's labels, as far as they are known."""
    unnamed: Unnamed | None = None
    """The key for looking up missing names; `None` if no name is missing."""

    def named(self, names: Mapping[str, CountedLabels]) -> "User":
        """Return this user with its labels from `names`, or unchanged if `names` lacks them.

        `names` comes from `names_in`.
        """
        if self.unnamed is None or (labels := names.get(self.unnamed.ident)) is None:
            return self
        return User(labels._replace(gpu_uuid=self.unnamed.gpu_uuid))


class Used(NamedTuple):
    """The amounts that one entry of a tick adds to the counters."""

    user: User
    amounts: UsedAmounts


@dataclass(slots=True)
class KnownUsers:
    """The users in a node's last event, reused for the next event if the descriptions are equal."""

    described: bytes | None = None
    """Digest of the event's descriptions (`digest_of_described`)."""
    devices: dict[str, "_DeviceUsers"] = field(default_factory=dict)


class _DeviceUsers(NamedTuple):
    """The users of the entries of one device."""

    owners: list[tuple[Any, ...]]
    """The positions and ids by which the entries refer to their users."""
    users: list[User]
    """For each entry, the user to which it is attributed."""
    allocatees: list[User]
    """For each entry, the user to which its part is allocated; one object per user."""


def base_units(amounts: UsedAmounts) -> SeriesValues:
    """Return the values of the series of `COUNTERS`, in base units."""
    # Dividing whole numbers rounds only once, so the value of a growing counter never decreases.
    # Built from a list, because a tuple from a generator takes a third longer.
    return (
        *[
            None if amount is None else amount / divisor
            for amount, divisor in zip(amounts, _DIVISORS, strict=True)
        ],
    )


def gauges_of(
    labels: CountedLabels, amounts: UsedAmounts, *, has_maxima: bool
) -> Mapping[SeriesGroup, SeriesValues]:
    """Return the usage gauges of the container or job with these counter labels, with values 0.

    A gauge has no value if the counter's amount is unknown. With `has_maxima`, the gauges of the
    maxima are included.
    """
    known = dict(zip((one.name for one in BOOKED), amounts, strict=False))
    gpu_uuid, category, *container, job_id = labels
    values = [None if known.get(one.name) is None else 0.0 for one in QUANTITIES_OF_USERS]
    group = SeriesGroup(POD, (gpu_uuid, *container))
    if category == Category.JOB:
        group = SeriesGroup(ACCOUNT, (gpu_uuid, category, job_id, *AllocationLabels()))
    found = {group: tuple(values)}
    if has_maxima:
        found[group._replace(family=maxima_of(group.family))] = tuple(values)
    return found


def add_amounts(total: UsedAmounts, more: UsedAmounts) -> None:
    """Add amounts to a total in place; unknown amounts add nothing."""
    for index, amount in enumerate(more):
        if amount is not None:
            total[index] = (total[index] or 0) + amount


def used_in(
    event: GpuEvent, known: KnownUsers | None = None, *, described: bytes | None = None
) -> Iterator[Used]:
    """Yield the amounts that an event's entries add to the counters of their users.

    `known` belongs to the node's last event and is updated to this one; `described` is the event's
    `digest_of_described`, if the caller has it. Raises `ValueError` if an entry refers to something
    that the event does not list.
    """
    if known is None:
        known = KnownUsers()
    else:
        described = described or digest_of_described(event)
    owners = _EntryOwners(event)
    if described != known.described:
        # The descriptions have changed, so positions in entries refer to other things now.
        known.described, known.devices = described, {}
    before, known.devices = known.devices, {}
    interval_ns = event.interval_ns
    for books in event.gpus:
        gpu_uuid = books.reading.uuid
        device, of_entries = before.get(gpu_uuid), [*map(_owner_key, books.entries)]
        # Entries keep their order as long as the same containers are on the device.
        if device is None or device.owners != of_entries:
            device = owners.users_of(gpu_uuid, books.entries, of_entries)
        known.devices[gpu_uuid] = device
        factors = _factors(gpu_units_of(books), interval_ns)
        for entry, user, allocatee in zip(
            books.entries, device.users, device.allocatees, strict=True
        ):
            amounts = _amounts_of(entry, factors)
            allocated = _take_allocated(entry, amounts, allocatee)
            yield Used(user, amounts)
            if allocated is not None:
                yield Used(allocatee, allocated)
    for adjustment in event.late_adjustments or ():
        books = gpu_of(adjustment, event)
        if (units := gpu_units_of(books)) is None:
            continue
        for entry in adjustment.entries:
            adjusted: UsedAmounts = [*_NOTHING]
            # A negative amount is busy time that was counted for the category earlier.
            index = _BUSY_INDEX if (entry.busy_ns or 0) >= 0 else _SETTLED_INDEX
            adjusted[index] = abs(entry.busy_ns or 0) * units
            yield Used(owners.user_of(books.reading.uuid, entry), adjusted)


def names_in(event: GpuEvent) -> dict[str, CountedLabels]:
    """Return the labels of all containers in the event whose names are complete, by look-up key.

    The look-up key is `Unnamed.ident`. `gpu_uuid` is empty in these labels.
    """
    pods = PodIndex(event)
    found: dict[str, CountedLabels] = {}
    for position in range(len(event.containers)):
        user = pods.user_of(Entry(category=Category.POD, container=position))
        labels = _labels("", user)
        if _is_named(labels):
            found[_ident(user)] = labels
    for position in range(len(event.allocations)):
        labels = _labels("", pods.allocatee_of(Entry(category=Category.IDLE, allocation=position)))
        if _is_named(labels):
            found[_name_of_allocatee(labels)] = labels
    return found


_booked_amounts: Final[Callable[[Entry], tuple[int | None, ...]]] = attrgetter(
    *(quantity.name for quantity in BOOKED)
)
_owner_key: Final[Callable[[Entry], tuple[Any, ...]]] = attrgetter(
    "category", "container", "allocation", "job_id", "allocation_unknown"
)
_OTHERS: Final = (None,) * (len(COUNTED) - len(BOOKED))


_Factors = tuple[tuple[int, int | None], ...]
"""Positions of booked quantities, and the factors by which they are counted. A quantity with the
factor `None` is not counted."""


# Most devices of a tick have the same factors.
@lru_cache(maxsize=256)
def _factors(units: int | None, interval_ns: int) -> _Factors:
    """Return the factors of a device with these units in a tick."""
    return tuple(
        (index, units if _is_time(quantity) else interval_ns)
        for index, quantity in enumerate(BOOKED)
        if _is_time(quantity) or quantity.is_gauge
    )


def _amounts_of(entry: Entry, factors: _Factors) -> UsedAmounts:
    amounts: UsedAmounts = [*_booked_amounts(entry), *_OTHERS]
    for index, factor in factors:
        if (amount := amounts[index]) is not None:
            amounts[index] = None if factor is None else amount * factor
    # The entries of a tick are never negative, but anybody may have written the event.
    if (amounts[_BUSY_INDEX] or 0) < 0:
        amounts[_BUSY_INDEX] = None
    return amounts


def _take_allocated(entry: Entry, amounts: UsedAmounts, allocatee: User) -> UsedAmounts | None:
    """Remove the allocated time from an entry's amounts; return the amounts of its allocatee."""
    units, amounts[_ALLOCATED_INDEX] = amounts[_ALLOCATED_INDEX], None
    if units is None:
        return None
    allocated: UsedAmounts = [*_NOTHING]
    allocated[_ALLOCATED_INDEX] = units
    if entry.category is Category.IDLE and allocatee.labels.category in _ALLOCATEES:
        allocated[_UNUSED_INDEX] = amounts[_BUSY_INDEX]
        allocated[_UNUSED_ENERGY_INDEX] = amounts[_ENERGY_INDEX]
    return allocated


_NO_OWNER: Final = CountedLabels("", "")
_FoundLabels = tuple[CountedLabels, str | None]
"""The labels without a device, and the look-up key if names are missing."""


class _EntryOwners:
    """Finds the users of one event's entries; looks up each container and allocation only once."""

    def __init__(self, event: GpuEvent) -> None:
        self._pods = PodIndex(event)
        self._users: dict[int | None, _FoundLabels] = {}
        self._allocatees: dict[int | None, _FoundLabels] = {
            None: (_NO_OWNER._replace(category=Category.IDLE.value), None)
        }

    def users_of(
        self, gpu_uuid: str, entries: Sequence[Entry], owners: list[tuple[Any, ...]]
    ) -> _DeviceUsers:
        # Most entries of a device have the same allocation, or none.
        by = [
            (entry.allocation, allocated_job_of(entry), entry.allocation_unknown)
            for entry in entries
        ]
        allocatees = {
            key: self.allocatee_of(gpu_uuid, entry) for key, entry in zip(by, entries, strict=True)
        }
        return _DeviceUsers(
            [*map(shared, owners)],
            [self.user_of(gpu_uuid, entry) for entry in entries],
            [allocatees[key] for key in by],
        )

    def user_of(self, gpu_uuid: str, entry: Entry) -> User:
        if entry.category is not Category.POD:
            return User(CountedLabels(gpu_uuid, entry.category.value, job_id=job_of(entry) or ""))
        found = self._users.get(entry.container)
        if found is None:
            user = self._pods.user_of(entry)
            found = self._users[entry.container] = _found_labels(user, _ident(user))
        return _on_device(gpu_uuid, found)

    def allocatee_of(self, gpu_uuid: str, entry: Entry) -> User:
        if (job := allocated_job_of(entry)) is not None:
            return User(CountedLabels(gpu_uuid, Category.JOB.value, job_id=job))
        if entry.allocation is None and entry.allocation_unknown:
            return User(CountedLabels(gpu_uuid, UNKNOWN))
        found = self._allocatees.get(entry.allocation)
        if found is None:
            allocatee = self._pods.allocatee_of(entry)
            found = _found_labels(allocatee, _name_of_allocatee(_labels("", allocatee)))
            self._allocatees[entry.allocation] = found
        return _on_device(gpu_uuid, found)


def _found_labels(pod: PodOfEntry, ident: str) -> _FoundLabels:
    labels = _labels("", pod)
    # If the pod belongs to another node, only its UID will ever be known.
    is_all = _is_named(labels) or pod.described.state is PodState.FOREIGN
    return labels, None if is_all else ident


def _on_device(gpu_uuid: str, found: _FoundLabels) -> User:
    labels, ident = found
    unnamed = None if ident is None else Unnamed(gpu_uuid, ident)
    return User(CountedLabels(gpu_uuid, *labels[1:]), unnamed)


def _labels(gpu_uuid: str, pod: PodOfEntry) -> CountedLabels:
    described = pod.described
    return CountedLabels(
        gpu_uuid,
        Category.POD.value,
        shared(described.namespace or ""),
        described.name or "",
        described.uid or "",
        shared(pod.container or ""),
    )


def _is_named(labels: CountedLabels) -> bool:
    return all((labels.namespace, labels.pod, labels.pod_uid, labels.container))


def _ident(user: PodOfEntry) -> str:
    return user.container_id or user.described.uid or ""


def _name_of_allocatee(labels: CountedLabels) -> str:
    return f"{labels.namespace}/{labels.pod}/{labels.container}"
