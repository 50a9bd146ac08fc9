"""The books of one row of a tick: who was on the GPU, and what is booked on whom. Pure.

How it works. The processes on a GPU become claims, one for each container, one for the host and one
for those of which nothing could be read (`gather_claims`). Each quantity is then split on its own:

- busy seconds (`split_busy`), by what the driver sampled of the processes, else by memory held,
  else in equal parts;
- memory byte-seconds (`split_memory`), by what the processes hold;
- joules (`split_joules`), by time up to the idle draw of the product, and by busy seconds beyond.

A split is a rate: so much for each unit of what a claim weighs. It also says what is in use and
nobody claims, and what is idle. `book_gpu` makes the entries of the three splits in an order that
readers may count on: the claims, the driver's reserved memory, nobody's, and idle by who holds it.
Whatever is read, the entries of a quantity sum to the device; of a quantity that the driver does
not give, nothing is booked: absent is not zero.

The arithmetic is the contract: a replay must give the same bytes, compiled or not, in all versions
of Python. So sums are added up in order (`add_up`), and nothing is simplified that would round
otherwise. This is the join's hottest code, some forty entries a tick, and is compiled with the
types in `shares.pxd` (ADR 019). That is why the classes here are plain ones: their fields are C.

How rows of a GPU that is cut by MIG are told apart, and which holder has which part, is known
elsewhere (`books`, `gpuledger.ledger.holders`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from gpuledger.ledger.holders import Parts
from gpuledger.ledger.quantities import rates_of
from gpuledger.records import Account, Entry, GpuProcess, GpuReading, Method, NodeSample

# Looked up once: an enum's member costs as much as the multiplication for which it stands.
_POD: Final = Account.POD
_HOST: Final = Account.HOST
_UNATTRIBUTED: Final = Account.UNATTRIBUTED
_IDLE: Final = Account.IDLE
_EXCLUSIVE: Final = Method.EXCLUSIVE
_PROCESS_UTILIZATION: Final = Method.PROCESS_UTILIZATION

MIN_RATIO: Final = 1e-9
"""Less than any driver can tell apart from nothing, and enough to divide by."""
# What is left of a whole after all parts of it, by rounding alone.
_ROUNDING_RATIO: Final = 1e-12
# Claims that no position in the tick's `containers` stands for.
_HOST_KEY, _NOBODY_KEY = -1, -2

# Board watts without a process and without a kernel, as nvidia-smi showed them on machines whose
# listings are public: the low end, as a floor too high would take from idle what work drew.
_IDLE_WATTS: Final = {
    "B200": 136.0,
    "H200": 76.0,
    "H200 NVL": 69.0,
    "H100 80GB HBM3": 71.0,
    "H100 PCIe": 50.0,
    "H20": 74.0,
    "A100-SXM4-80GB": 45.0,
    "A100-SXM4-40GB": 42.0,
    "A100 80GB PCIe": 44.0,
    "A40": 21.0,
    "A30": 28.0,
    "A10": 17.0,
    "L40S": 22.0,
    "L4": 15.0,
    "T4": 9.0,
    "V100-SXM2": 38.0,
}
LISTED_PRODUCTS: Final = len(_IDLE_WATTS)


class Claim:
    """One account's claim on one GPU in one tick, summed over its processes there."""

    __slots__ = ("account", "container", "has_ended", "memory_bytes", "sm_ratio")

    def __init__(
        self,
        account: Account,
        container: int | None = None,
        sm_ratio: float | None = None,
        memory_bytes: int | None = None,
        has_ended: bool = False,  # noqa: FBT001, FBT002  # by position, as keywords cost more
    ) -> None:
        self.account = account
        """`pod`, `host`, or `unattributed` for processes of which nothing could be read."""
        self.container = container
        """On a pod's: position of its container in the tick's `containers`."""
        self.sm_ratio = sm_ratio
        """Sum of its processes' SM utilization; absent where the driver gave none of them."""
        self.memory_bytes = memory_bytes
        """Device memory of its processes at the tick; absent where the driver gave none of them."""
        self.has_ended = has_ended
        """Whether one of its processes ended within the tick."""

    def add(self, process: GpuProcess) -> None:
        """Add what is known of one process; one that ended holds no memory any more."""
        if process.sm_utilization_ratio is not None:
            self.sm_ratio = (self.sm_ratio or 0.0) + process.sm_utilization_ratio
        if process.ended:
            self.has_ended = True
        elif process.memory_used_bytes is not None:
            self.memory_bytes = (self.memory_bytes or 0) + process.memory_used_bytes


class BusySplit:
    """The time in which kernels ran, split among the claims."""

    __slots__ = ("ended_seconds", "method", "seconds_per_weight", "weights", "worked_seconds")

    def __init__(
        self,
        weights: list[float],
        seconds_per_weight: float,
        ended_seconds: float,
        worked_seconds: float,
        method: Method,
    ) -> None:
        self.weights = weights
        """What each claim weighs, in their order; without claims, nobody's."""
        self.seconds_per_weight = seconds_per_weight
        """Busy seconds for a unit of weight."""
        self.ended_seconds = ended_seconds
        """What a claim gets besides of which a process has ended."""
        self.worked_seconds = worked_seconds
        """The sum of all that was busy; nobody's where there is no claim."""
        self.method = method
        """How the parts were found."""


class MemorySplit:
    """The memory times the time, split among the claims, nobody and idle."""

    __slots__ = ("free_byte_seconds", "held_bytes", "seconds_per_byte", "unclaimed_byte_seconds")

    def __init__(
        self,
        held_bytes: list[float],
        seconds_per_byte: float,
        unclaimed_byte_seconds: float,
        free_byte_seconds: float,
    ) -> None:
        self.held_bytes = held_bytes
        """What each claim holds, in their order."""
        self.seconds_per_byte = seconds_per_byte
        """Less than the tick where claims hold more than is in use."""
        self.unclaimed_byte_seconds = unclaimed_byte_seconds
        """What is in use, and nobody claims."""
        self.free_byte_seconds = free_byte_seconds
        """What nobody uses."""


class Energy:
    """The energy of one row of a tick."""

    __slots__ = ("floor_joules", "idle_joules", "joules")

    def __init__(self, joules: float, floor_joules: float, idle_joules: float) -> None:
        self.joules = joules
        """What is split by busy time."""
        self.floor_joules = floor_joules
        """How much of that it would have drawn idle; all of it where nobody knows."""
        self.idle_joules = idle_joules
        """What is idle's anyway, beside it."""


class EnergySplit:
    """The energy, split between those that were busy, nobody and idle."""

    __slots__ = ("idle_joules", "unclaimed_joules", "watts")

    def __init__(self, watts: float, unclaimed_joules: float, idle_joules: float) -> None:
        self.watts = watts
        """Joules for each busy second."""
        self.unclaimed_joules = unclaimed_joules
        """What is nobody's, as it is not known who was busy."""
        self.idle_joules = idle_joules
        """What is idle's."""


class RowSplits:
    """The splits of one row; where one is absent, its quantity is absent from all entries."""

    __slots__ = ("busy", "energy", "memory", "method")

    def __init__(
        self, busy: BusySplit | None, memory: MemorySplit | None, energy: EnergySplit | None
    ) -> None:
        self.busy = busy
        self.memory = memory
        self.energy = energy
        self.method = _EXCLUSIVE if busy is None else busy.method
        """The method that all entries of the row bear."""

    def entry(
        self,
        account: Account,
        container: int | None,
        seconds: float,
        byte_seconds: float,
        joules: float,
    ) -> Entry:
        """Return an entry of the quantities that are known."""
        return Entry(
            account=account,
            method=self.method,
            container=container,
            busy_seconds=None if self.busy is None else seconds,
            memory_byte_seconds=None if self.memory is None else byte_seconds,
            joules=None if self.energy is None else joules,
        )


def book_gpu(
    reading: GpuReading,
    claims: list[Claim],
    seconds: float,
    energy: Energy | None,
    holders: Parts = (),
) -> list[Entry]:
    """Return the entries of one row: one a claim, the host, what nobody claims, and idle.

    Busy seconds sum to `seconds`, memory byte-seconds to total memory times `seconds`, joules to
    `energy`; a quantity that the driver does not give is absent from all entries. Idle has an
    entry for each container that holds a part of the GPU, and one for what nobody holds.
    """
    busy = split_busy(reading.utilization_ratio, claims, seconds)
    total_bytes = reading.memory_total_bytes
    # What the driver keeps for itself is in use, and no process's; readings may contradict.
    reserved_bytes = min(reading.memory_reserved_bytes or 0, total_bytes or 0)
    memory = None
    if total_bytes is not None:
        limit_bytes = total_bytes - reserved_bytes
        memory = split_memory(reading.memory_used_bytes, claims, seconds, limit_bytes)
    joules = split_joules(energy, None if busy is None else busy.worked_seconds, seconds)
    splits = RowSplits(busy, memory, joules)
    entries = _book_claims(claims, splits, reserved_bytes * seconds)
    _book_unclaimed(entries, claims, splits, reading)
    _book_idle(entries, splits, seconds, holders)
    return entries


def gather_claims(sample: NodeSample) -> list[list[Claim]]:
    """Return the claims on each GPU of the tick, in the order of its `gpus`, the host's last.

    A process without a container, or whose container shows neither id nor pod, is the host's. One
    whose start could not be read either was gone before it could be looked at: nobody's. Raises
    `IndexError` where a process points to a GPU or a container that the tick does not have.
    """
    # A cgroup path that shows neither is no pod's, whatever container the agent took it for.
    keys = [
        _HOST_KEY if container.container_id is None and container.pod_uid is None else index
        for index, container in enumerate(sample.containers)
    ]
    found: list[dict[int, Claim]] = [{} for _ in sample.gpus]
    for process in sample.processes:
        container = process.container
        if container is not None:
            key = keys[container]
        else:
            key = _NOBODY_KEY if process.started_boottime_ns is None else _HOST_KEY
        on_gpu = found[process.gpu]
        claim = on_gpu.get(key)
        if claim is None:
            # Made with what is known of the first process, as most claims have no second one.
            ended = process.ended is True
            on_gpu[key] = Claim(
                _POD if key >= 0 else _HOST if key == _HOST_KEY else _UNATTRIBUTED,
                key if key >= 0 else None,
                process.sm_utilization_ratio,
                None if ended else process.memory_used_bytes,
                ended,
            )
        else:
            claim.add(process)
    for on_gpu in found:
        if _HOST_KEY in on_gpu:
            on_gpu[_HOST_KEY] = on_gpu.pop(_HOST_KEY)
    return [list(on_gpu.values()) for on_gpu in found]


def add_up(weights: Sequence[float]) -> float:
    """Sum as Python did before 3.12, whose sum() rounds less: all versions are to book the same."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


def are_unmeasured(claims: Sequence[Claim]) -> bool:
    """Return whether the driver gave no utilization of any process."""
    for claim in claims:  # noqa: SIM110 - all() costs three times as much, for each GPU and tick
        if claim.sm_ratio is not None:
            return False
    return True


def split_busy(
    utilization_ratio: float | None, claims: list[Claim], seconds: float
) -> BusySplit | None:
    """Split the time in which kernels ran; `None` where the driver said nothing of it.

    Several claims have what the driver sampled of their processes. Its process samples end with the
    process, so the kernels of the last moments of a process that ended show on the device only:
    what is missing is its. Otherwise the difference is rounding (whole percents on both sides), and
    spread in proportion.
    """
    if utilization_ratio is not None:
        ratio = utilization_ratio
    elif are_unmeasured(claims):
        return None
    else:
        ratio = add_up([claim.sm_ratio or 0.0 for claim in claims])
    # Processes that overlap add up to more than the tick; a device is never busy for longer.
    busy_seconds = ratio * seconds if ratio < 1.0 else seconds
    if len(claims) <= 1:
        return BusySplit([1.0], busy_seconds, 0.0, busy_seconds, _EXCLUSIVE)
    ratios = [claim.sm_ratio or 0.0 for claim in claims]
    total = add_up(ratios)
    if total == 0.0 and are_unmeasured(claims):
        return _split_by_memory(busy_seconds, claims)
    missing = busy_seconds - total * seconds
    if missing > 0.0 and (ended := [claim for claim in claims if claim.has_ended]):
        of_ended = missing / len(ended)
        return BusySplit(ratios, seconds, of_ended, busy_seconds, _PROCESS_UTILIZATION)
    if total <= MIN_RATIO and busy_seconds > 0.0:
        # The samples say that nobody was busy, and the device was: they are no measure of it.
        return _split_by_memory(busy_seconds, claims)
    rate = busy_seconds / total if total > MIN_RATIO else 0.0
    return BusySplit(ratios, rate, 0.0, busy_seconds, _PROCESS_UTILIZATION)


def _split_by_memory(busy_seconds: float, claims: list[Claim]) -> BusySplit:
    """Without a measure of use, memory held is the next best; without that, equal parts."""
    held: list[float] = [claim.memory_bytes or 0 for claim in claims]
    total = add_up(held)
    if total:
        return BusySplit(held, busy_seconds / total, 0.0, busy_seconds, Method.MEMORY_SHARE)
    ones = [1.0] * len(claims)
    return BusySplit(ones, busy_seconds / len(claims), 0.0, busy_seconds, Method.EQUAL_SHARE)


def split_memory(
    used_bytes: int | None, claims: list[Claim], seconds: float, limit_bytes: int
) -> MemorySplit:
    """Split the bytes in use, times the seconds.

    What the processes hold is theirs, scaled down where they claim more than is in use. The rest
    is nobody's, unless the driver tells no process's memory and there is only one claim. Never more
    than `limit_bytes`: readings taken one after the other need not agree.
    """
    held: list[float] = [claim.memory_bytes or 0 for claim in claims]
    total = add_up(held)
    limit = float(limit_bytes)
    used = total if used_bytes is None else float(used_bytes)
    if used > limit:  # noqa: PLR1730 - min() costs three times as much, for each GPU and tick
        used = limit
    free = (limit - used) * seconds
    if total > used:
        # The processes' parts of what is in use, times its seconds.
        return MemorySplit(held, used * seconds / total, 0.0, free)
    if len(claims) == 1 and claims[0].memory_bytes is None and not claims[0].has_ended:
        # The driver lists the process without its memory, and nobody else is there to have it.
        return MemorySplit([used], seconds, 0.0, free)
    return MemorySplit(held, seconds, (used - total) * seconds, free)


@lru_cache(maxsize=256)
def idle_watts(model: str | None) -> float | None:
    """Return the idle draw of a product; `None` where it is not known."""
    name = (model or "").removeprefix("NVIDIA ").removeprefix("Tesla ")
    # Whole words alone, and the longest that fit: an A1000 is no A100, an H200 NVL is no H200.
    known = [
        product
        for product in _IDLE_WATTS
        if name == product or name.startswith((f"{product} ", f"{product}-"))
    ]
    return _IDLE_WATTS[max(known, key=len)] if known else None


def energy_of(reading: GpuReading, seconds: float) -> Energy | None:
    """Return what a board drew; `None` where it gives neither energy nor power."""
    if reading.energy_joules is not None:
        joules = reading.energy_joules
    elif reading.power_watts is not None:
        joules = reading.power_watts * seconds
    else:
        return None
    watts = idle_watts(reading.model)
    # A floor above what was drawn would make the active draw, and somebody's joules, negative.
    if watts is None or watts * seconds > joules:
        return Energy(joules, joules, 0.0)
    return Energy(joules, watts * seconds, 0.0)


def split_joules(
    energy: Energy | None, worked_seconds: float | None, seconds: float
) -> EnergySplit | None:
    """Split the energy; `None` where it is not known.

    The floor goes by time, idle time included; what was drawn above it goes to those that were
    busy, `worked_seconds` in sum, in proportion. Where nobody was, all is idle's; where that is not
    known, all is nobody's.
    """
    if energy is None:
        return None
    if worked_seconds is None:
        return EnergySplit(0.0, energy.joules, energy.idle_joules)
    worked = worked_seconds
    if worked <= MIN_RATIO * seconds:
        return EnergySplit(0.0, 0.0, energy.joules + energy.idle_joules)
    floor_watts = energy.floor_joules / seconds
    watts = floor_watts + (energy.joules - energy.floor_joules) / worked
    return EnergySplit(watts, 0.0, (seconds - worked) * floor_watts + energy.idle_joules)


def _book_claims(claims: list[Claim], splits: RowSplits, reserved: float) -> list[Entry]:
    """Return the entries of what is claimed; what the driver reserved is the host's.

    `reserved` is in byte-seconds.
    """
    busy, memory, energy = splits.busy, splits.memory, splits.energy
    watts = 0.0 if energy is None else energy.watts
    seconds = byte_seconds = 0.0
    entries = []
    for index, claim in enumerate(claims):
        if busy is not None:
            seconds = busy.weights[index] * busy.seconds_per_weight
            if claim.has_ended:
                seconds += busy.ended_seconds
        if memory is not None:
            byte_seconds = memory.held_bytes[index] * memory.seconds_per_byte
        if claim.account is _HOST:
            byte_seconds, reserved = byte_seconds + reserved, 0.0
        entries.append(
            splits.entry(claim.account, claim.container, seconds, byte_seconds, seconds * watts)
        )
    if reserved:
        entries.append(splits.entry(_HOST, None, 0.0, reserved, 0.0))
    return entries


def _book_unclaimed(
    entries: list[Entry], claims: list[Claim], splits: RowSplits, reading: GpuReading
) -> None:
    """Append what nobody claims; activity while nobody was seen to be busy is nobody's too."""
    busy, memory, energy = splits.busy, splits.memory, splits.energy
    worked = 0.0 if busy is None else busy.worked_seconds
    byte_seconds = 0.0 if memory is None else memory.unclaimed_byte_seconds
    seconds = 0.0 if claims else worked
    joules = 0.0 if energy is None else seconds * energy.watts + energy.unclaimed_joules
    # Apportioned quantities go by busy seconds: with none of them, they need an entry to go to.
    if seconds or byte_seconds or joules or (not worked and any(rates_of(reading))):
        entries.append(splits.entry(_UNATTRIBUTED, None, seconds, byte_seconds, joules))


def _book_idle(entries: list[Entry], splits: RowSplits, seconds: float, holders: Parts) -> None:
    """Append what nobody used, by what each container holds of the GPU, and what nobody holds."""
    busy, memory, energy = splits.busy, splits.memory, splits.energy
    idle_seconds = 0.0 if busy is None else seconds - busy.worked_seconds
    byte_seconds = 0.0 if memory is None else memory.free_byte_seconds
    joules = 0.0 if energy is None else energy.idle_joules
    held = 0.0
    parts: list[tuple[int | None, float]] = []
    for allocation, ratio in holders:
        held += ratio
        parts.append((allocation, ratio))
    if 1.0 - held > _ROUNDING_RATIO:
        parts.append((None, 1.0 - held))
    for holder, ratio in parts:
        entries.append(
            Entry(
                account=_IDLE,
                method=splits.method,
                busy_seconds=None if busy is None else idle_seconds * ratio,
                memory_byte_seconds=None if memory is None else byte_seconds * ratio,
                joules=None if energy is None else joules * ratio,
                allocation=holder,
            )
        )
