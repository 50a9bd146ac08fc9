"""Makes the entries of one row of a tick: the amount of each quantity for each user. Pure.

Theory of operation. The processes on a GPU become claims: one per container of a pod, one per job,
one for the host, and one for processes that could not be identified (`gather_claims`). Each
quantity is then split separately:

- busy time (`split_busy`): by the driver's samples of the processes, else by the memory of the
  processes, else in equal parts;
- memory (`split_memory`): by the memory of the processes;
- energy (`split_energy`): idle gets the idle draw for the time without a kernel; the rest is
  divided in proportion to busy time.

A split contains the part of each claim, the part that is used but not claimed, and the idle part.
The idle part is divided among the containers and jobs to which the device is allocated. `book_gpu`
makes entries from the three splits, in an order that consumers may rely on:

1. the containers of pods, by UID and container id;
2. jobs, by id;
3. the host;
4. `unattributed`;
5. idle: containers, then jobs, then the part that is not allocated, or whose allocation is unknown.

Whatever the readings are, the entries of a quantity sum to the device's total. A quantity that the
driver does not report is absent from the entries, not zero.

The arithmetic is a contract: a replay must produce the same bytes, compiled or not. It uses whole
numbers only; ratios are in parts per million. The amount of an entry is its exact share, a
fraction, rounded up or down so that the sum is whole (`gpuledger.ledger.division`): among equal
claims, the first in the order above gets the remaining unit. The order in which a tick lists
processes, containers or allocations does not affect the result.

This is the join's hottest code, with about forty entries per tick. It is compiled with the types in
`shares.pxd` (ADR 019), so the classes here are plain classes, and their fields become C fields.

`books` separates the rows of a GPU with MIG instances, and `gpuledger.ledger.allocated_parts` finds
the part that is allocated to each container and job.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import GpuledgerError
from gpuledger.ledger.allocated_parts import UNALLOCATED_PARTS, AllocatedParts
from gpuledger.ledger.division import (
    MAX_PRODUCT,
    PPM,
    Portion,
    divide,
    nearest,
    parts_per_million,
    share_out,
)
from gpuledger.ledger.entries import UNKNOWN_SLICES, DeviceSlices
from gpuledger.ledger.quantities import rates_of
from gpuledger.records import (
    AllocatedMethod,
    BusyMethod,
    Category,
    ContainerRef,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuProcess,
    GpuReading,
    IdleDrawSource,
    MemoryMethod,
    NodeSample,
)

# Looked up once, because reading a member of an enum costs as much as a multiplication.
_POD: Final = Category.POD
_JOB: Final = Category.JOB
_HOST: Final = Category.HOST
_UNATTRIBUTED: Final = Category.UNATTRIBUTED
_IDLE: Final = Category.IDLE
_EXCLUSIVE: Final = BusyMethod.EXCLUSIVE
_PROCESS_UTILIZATION: Final = BusyMethod.PROCESS_UTILIZATION
_MEMORY_SHARE: Final = BusyMethod.MEMORY_SHARE
_EQUAL_SHARE: Final = BusyMethod.EQUAL_SHARE
_SAMPLED: Final = BusyMethod.SAMPLED
_MPS_SERVER: Final = BusyMethod.MPS_SERVER
_MEASURED: Final = MemoryMethod.MEASURED
_SCALED: Final = MemoryMethod.SCALED
_APPORTIONED: Final = MemoryMethod.APPORTIONED
_UNIFIED: Final = MemoryMethod.UNIFIED
_ALLOCATED_SCALED: Final = AllocatedMethod.SCALED
_DRAW_MEASURED: Final = IdleDrawSource.MEASURED
_DRAW_OF_TABLE: Final = IdleDrawSource.TABLE

# Power of a board without processes and kernels, from published nvidia-smi output of real machines.
# The values are low on purpose: too high a value would book the energy of work as idle.
IDLE_MILLIWATTS: Final = {
    "B200": 136_000,
    "H200": 76_000,
    "H200 NVL": 69_000,
    "H100 80GB HBM3": 71_000,
    "H100 PCIe": 50_000,
    "H20": 74_000,
    "A100-SXM4-80GB": 45_000,
    "A100-SXM4-40GB": 42_000,
    "A100 80GB PCIe": 44_000,
    "A40": 21_000,
    "A30": 28_000,
    "A10": 17_000,
    "L40S": 22_000,
    "L4": 15_000,
    "T4": 9_000,
    "V100-SXM2": 38_000,
}


class RepeatedContainerError(GpuledgerError):
    """A tick lists a container twice; the argument is the index of the second one in the tick."""


class Claim(Portion):
    """One user's claim on one GPU in one tick, summed over the user's processes on this GPU.

    A user is a container of a pod, a job, the host, or `unattributed`. The splits store the claim's
    parts in `busy_ns`, `booked_bytes` and `millijoules`.
    """

    __slots__ = (
        "booked_bytes",
        "busy_ns",
        "category",
        "container",
        "has_ended",
        "has_memory",
        "is_sampled",
        "job_id",
        "memory_bytes",
        "millijoules",
        "rank",
        "sm_ppm",
    )

    def __init__(self) -> None:
        # No super(), because Python would look it up for each claim of each tick. No arguments,
        # because passing them costs as much as setting all fields.
        self.weight = self.part = 0
        self.category = _UNATTRIBUTED
        """`pod`, `job`, `host`, or `unattributed` for processes that could not be identified."""
        self.container: int | None = None
        """For a pod: the position of its container in the tick's `containers`."""
        self.job_id: str | None = None
        """For a job: its id."""
        self.rank = 0
        """Position of the claim in the order that `gather_claims` describes."""
        self.is_sampled = False
        """Whether the driver reported the SM utilization of any process of the claim."""
        self.sm_ppm = 0
        """Sum of the SM utilization of the claim's processes, in parts per million."""
        self.has_memory = False
        """Whether the driver reported the memory of any process of the claim."""
        self.memory_bytes = 0
        """Device memory of the claim's processes at the end of the tick, in bytes."""
        self.has_ended = False
        """Whether any process of the claim ended within the tick."""
        self.busy_ns = 0
        """Busy time booked for the user, in nanoseconds."""
        self.booked_bytes = 0
        """Memory booked for the user, in bytes."""
        self.millijoules = 0
        """Energy booked for the user, in millijoules."""

    def add(self, process: GpuProcess) -> None:
        """Add the readings of one process; the memory of an ended process is not counted."""
        ratio = process.sm_utilization_ratio
        if ratio is not None:
            self.is_sampled = True
            self.sm_ppm += parts_per_million(ratio)
        if process.ended:
            self.has_ended = True
            return
        memory_bytes = process.memory_used_bytes
        if memory_bytes is not None:
            self.has_memory = True
            self.memory_bytes += memory_bytes


def make_claim(
    category: Category, container: int | None = None, rank: int = 0, job_id: str | None = None
) -> Claim:
    """Return a claim of a user, to which no process has been added yet."""
    claim = Claim()
    claim.category = category
    claim.container = container
    claim.rank = rank
    claim.job_id = job_id
    return claim


class Split:
    """One quantity of a row, divided into used and idle. Each claim stores its part of `used`."""

    __slots__ = ("idle", "idle_parts", "method", "unclaimed", "used")

    def __init__(self) -> None:
        self.used = 0
        """The amount that is not idle."""
        self.unclaimed = 0
        """Part of `used` that belongs to no claim."""
        self.idle = 0
        """The amount that is idle."""
        self.idle_parts: list[int] | None = None
        """The idle amount of each allocated part of the device; `None` if there is only one part.
        """
        self.method: Any = None
        """How the amount was determined, such as a `BusyMethod` for busy time."""

    def divide_idle(self, numerator: int, denominator: int, allocated: AllocatedParts) -> None:
        """Divide the idle amount among the device's parts.

        The exact idle amount, before rounding, is `numerator` / `denominator`.
        """
        pieces = [number for _, number in allocated.parts]
        self.idle_parts = divide(self.idle, pieces, numerator, denominator * allocated.whole)

    def idle_of(self, part: int) -> int:
        """Return the idle amount of one part of the device, given the index of the part."""
        return self.idle if self.idle_parts is None else self.idle_parts[part]


def make_split(used: int, idle: int, method: Any) -> Split:  # noqa: ANN401  # of any enumeration
    """Return a split in which no part belongs to a claim yet."""
    split = Split()
    split.used = used
    split.idle = idle
    split.method = method
    return split


class Energy:
    """The energy of one row of a tick, and its idle draw."""

    __slots__ = (
        "floor_denominator",
        "floor_numerator",
        "idle_draw_milliwatts",
        "idle_draw_source",
        "idle_millijoules",
        "method",
        "millijoules",
    )

    def __init__(  # noqa: PLR0917  # by position, as keywords cost more
        self,
        millijoules: int,
        floor_numerator: int,
        floor_denominator: int,
        method: EnergyMethod | None = None,
        idle_draw_milliwatts: int | None = None,
        idle_draw_source: IdleDrawSource | None = None,
        idle_millijoules: int = 0,
    ) -> None:
        self.millijoules = millijoules
        """Energy to split between claims and idle."""
        self.floor_numerator = floor_numerator
        self.floor_denominator = floor_denominator
        """`floor_numerator` / `floor_denominator` is the idle draw in millijoules per nanosecond,
        at most the actual draw."""
        self.method = method
        """How the energy was determined."""
        self.idle_draw_milliwatts = idle_draw_milliwatts
        """The board's idle draw that the floor is based on; `None` if unknown."""
        self.idle_draw_source = idle_draw_source
        """Where the idle draw comes from."""
        self.idle_millijoules = idle_millijoules
        """Energy that is idle in any case and not included in `millijoules`."""


def book_gpu(  # noqa: PLR0917  # by position, as keywords cost more
    reading: GpuReading,
    own: GpuReading,
    claims: list[Claim],
    interval_ns: int,
    energy: Energy | None,
    allocated: AllocatedParts = UNALLOCATED_PARTS,
    slices: DeviceSlices = UNKNOWN_SLICES,
) -> GpuBooks:
    """Return the books of one row: its reading, and the entries among which the reading is divided.

    `own` is the reading with only the row's own values; `slices` is the row's part of the board.
    Busy time sums to the interval, memory to the total memory, energy to `energy`. A quantity that
    the driver does not report is absent from all entries. There is one idle entry for each
    container and job to which a part of the GPU is allocated, and one for the rest, if any. The
    allocated times of the idle entries sum to the interval.
    """
    several = allocated if len(allocated.parts) > 1 else None
    busy = split_busy(own.utilization_ratio, claims, interval_ns, several)
    reserved_bytes = 0
    memory = joules = None
    total_bytes = own.memory_total_bytes
    if total_bytes is not None:
        # Reserved memory is in use by the driver, not by a process. Readings may contradict each
        # other.
        limit_bytes = total_bytes
        reserved_bytes = own.memory_reserved_bytes or 0
        if reserved_bytes > limit_bytes:  # noqa: PLR1730 - min() costs three times as much
            reserved_bytes = limit_bytes
        memory = split_memory(own.memory_used_bytes, claims, limit_bytes - reserved_bytes, several)
        if reading.memory_unified and memory.method is not _SCALED:
            # The GPU shares the machine's memory, so only the memory of GPU processes counts as
            # used. Memory that other programs use is idle for the GPU, like free memory.
            memory.method = _UNIFIED
    if energy is not None:
        joules = split_energy(energy, busy, claims, interval_ns, several)
    if reserved_bytes:
        host = _claim_of(_HOST, claims)
        host.booked_bytes += reserved_bytes
    unclaimed_ns = 0 if busy is None else busy.unclaimed
    unclaimed_bytes = 0 if memory is None else memory.unclaimed
    unclaimed_millijoules = 0 if joules is None else joules.unclaimed
    is_busy = busy is not None and busy.used > 0
    # Apportioned quantities follow busy time; without busy time, `unattributed` gets them.
    if (
        unclaimed_ns
        or unclaimed_bytes
        or unclaimed_millijoules
        or (not is_busy and any(rates_of(reading)))
    ):
        unattributed = _claim_of(_UNATTRIBUTED, claims)
        unattributed.busy_ns += unclaimed_ns
        unattributed.booked_bytes += unclaimed_bytes
        unattributed.millijoules += unclaimed_millijoules
    return GpuBooks(
        # The row's original reading, not `own`: consumers see the memory of the whole board.
        reading=reading,
        entries=_enter(
            claims, allocated, allocated_times(interval_ns, allocated), busy, memory, joules
        ),
        busy_method=None if busy is None else _busy_method(busy, reading),
        memory_method=None if memory is None else memory.method,
        allocated_method=_ALLOCATED_SCALED if allocated.is_scaled else None,
        energy_method=None
        if energy is None or reading.energy_method is not None
        else energy.method,
        idle_draw_milliwatts=None
        if energy is None or reading.idle_draw_milliwatts is not None
        else energy.idle_draw_milliwatts,
        idle_draw_source=None if energy is None else energy.idle_draw_source,
        gap_ns=interval_ns if reading.unresponsive else None,
        compute_slices=slices.compute_slices,
        memory_slices=slices.memory_slices,
        gpu_compute_slices=slices.gpu_compute_slices,
        gpu_memory_slices=slices.gpu_memory_slices,
    )


def _busy_method(busy: Split, reading: GpuReading) -> BusyMethod:
    """Return how busy time was determined.

    If it was derived from process samples, the reading's own method takes precedence. With only
    one claim, so does `sampled`, because the device's busy time is an estimate too, and
    `mps_server`, because the claim is a server's and its clients are unknown.
    """
    method: BusyMethod = busy.method
    own = reading.busy_method
    if own is not None and (
        method is _PROCESS_UTILIZATION
        or (method is _EXCLUSIVE and (own is _SAMPLED or own is _MPS_SERVER))
    ):
        return own
    return method


def gather_claims(sample: NodeSample) -> list[list[Claim]]:
    """Return the claims on each GPU of the tick, in the order of the tick's `gpus`.

    The claims of pods come first, by UID and container id, then the claims of jobs by id, then the
    claims of the host and of `unattributed`. A process belongs to the host if it has no container,
    or if its container has no id, no pod and no job. A process is `unattributed` if it ended before
    the agent could read its start time and its container. Raise `IndexError` if a process refers to
    a GPU or a container that the tick does not have, and `RepeatedContainerError` if the tick lists
    a container twice.
    """
    containers = sample.containers
    order, ranks, jobs = _rank(containers)
    host = len(order)
    # Processes are sorted by rank first, so that the claims of each GPU come in order.
    of_rank: list[list[GpuProcess]] = [[] for _ in range(host + 2)]
    for process in sample.processes:
        container = process.container
        if container is not None:
            rank = ranks[container]
        else:
            rank = host + 1 if process.started_boottime_ns is None else host
        of_rank[rank].append(process)
    found: list[list[Claim]] = [[] for _ in sample.gpus]
    for rank, processes in enumerate(of_rank):
        for process in processes:
            claims = found[process.gpu]
            if claims:
                claim = claims[-1]
                if claim.rank == rank:
                    claim.add(process)
                    continue
            if rank < jobs:
                claim = make_claim(_POD, order[rank], rank)
            elif rank < host:
                claim = make_claim(_JOB, None, rank, containers[order[rank]].job_id)
            else:
                claim = make_claim(_HOST if rank == host else _UNATTRIBUTED, None, rank)
            claim.add(process)
            claims.append(claim)
    return found


def _rank(containers: Sequence[ContainerRef]) -> tuple[list[int], list[int], int]:
    """Return the order of claims, the rank of each container in it, and the first rank of a job.

    The order consists of positions in `containers`: containers of pods, then jobs. A job with
    several containers is one claim, at the position of one of its containers. A container with no
    id, no pod and no job gets the host's rank, which follows the ranks of pods and jobs. Raise
    `RepeatedContainerError` if a container is listed twice.
    """
    names: list[tuple[str, str, int]] = []
    of_jobs: list[tuple[str, str, int]] = []
    ranks = []
    for index, container in enumerate(containers):
        pod_uid, container_id = container.pod_uid, container.container_id
        ranks.append(-1)
        if pod_uid is None and container.job_id is not None:
            of_jobs.append((container.job_id, container_id or "", index))
        elif pod_uid is not None or container_id is not None:
            names.append((pod_uid or "", container_id or "", index))
    names.sort()
    order = []
    last_uid, last_id = None, None
    for rank, (pod_uid, container_id, index) in enumerate(names):
        if container_id == last_id and pod_uid == last_uid:
            raise RepeatedContainerError(index)
        last_uid, last_id = pod_uid, container_id
        order.append(index)
        ranks[index] = rank
    jobs = len(order)
    if of_jobs:
        _rank_jobs(of_jobs, order, ranks)
    if len(names) + len(of_jobs) < len(ranks):
        ranks = [len(order) if rank < 0 else rank for rank in ranks]
    return order, ranks, jobs


def _rank_jobs(names: list[tuple[str, str, int]], order: list[int], ranks: list[int]) -> None:
    """Append jobs to `order` after the containers of pods, and set `ranks`: one rank per job."""
    names.sort()
    last_job, last_id = None, None
    for job_id, container_id, index in names:
        if job_id != last_job:
            order.append(index)
        elif container_id == last_id:
            raise RepeatedContainerError(index)
        last_job, last_id = job_id, container_id
        ranks[index] = len(order) - 1


def are_unmeasured(claims: Sequence[Claim]) -> bool:
    """Return whether the utilization of every process is unknown."""
    for claim in claims:  # noqa: SIM110 - all() costs three times as much, for each GPU and tick
        if claim.is_sampled:
            return False
    return True


def split_busy(
    utilization_ratio: float | None,
    claims: list[Claim],
    interval_ns: int,
    several: AllocatedParts | None = None,
) -> Split | None:
    """Split the interval into busy and idle time, and the busy time among the claims.

    Return `None` if the driver reports neither the utilization of the device nor that of the
    processes. `several` is given if the device has several allocated parts; the idle time is then
    divided among these parts.
    """
    if utilization_ratio is not None:
        ppm = parts_per_million(utilization_ratio)
    elif are_unmeasured(claims):
        return None
    else:
        ppm = 0
        for claim in claims:
            ppm += claim.sm_ppm
    # The utilization of overlapping processes may exceed 100 %; a device's never does.
    if ppm > PPM:  # noqa: PLR1730 - min() costs three times as much, for each GPU and tick
        ppm = PPM
    numerator, denominator = interval_ns, PPM
    numerator *= ppm
    busy_ns = nearest(1, numerator, denominator)
    split = make_split(busy_ns, interval_ns - busy_ns, _EXCLUSIVE)
    if several is not None:
        split.divide_idle(interval_ns * denominator - numerator, denominator, several)
    if not claims:
        split.unclaimed = busy_ns
        return split
    if len(claims) == 1:
        claim = claims[0]
        claim.busy_ns = busy_ns
        return split
    split.method = _weigh(claims, ppm)
    _share_busy(busy_ns, claims, numerator)
    return split


def _share_busy(busy_ns: int, claims: list[Claim], numerator: int) -> None:
    """Divide the busy time of a row among the claims, in proportion to their weights.

    The exact busy time, before rounding to `busy_ns`, is `numerator` / 1,000,000 nanoseconds.
    """
    total = 0
    for claim in claims:
        total += claim.weight
    # If all weights are zero, there is no busy time to share either.
    if not total:
        return
    # Compared as C doubles, which costs next to nothing.
    size, weights, denominator = numerator, total, total
    denominator *= PPM
    if size * weights < MAX_PRODUCT:
        share_out(busy_ns, claims, numerator, denominator)
    else:
        large_numerator, large_denominator = numerator, denominator
        share_out(busy_ns, claims, large_numerator, large_denominator)
    for claim in claims:
        claim.busy_ns = claim.part


def _weigh(claims: list[Claim], ppm: int) -> BusyMethod:
    """Set the weights by which several claims share busy time; return the method.

    The weights are the driver's samples of the processes. A process has no samples after it ends,
    so the device's utilization (`ppm`) may include kernels that no sample shows. If a process
    ended, the missing part goes to the claims with ended processes. Otherwise all claims are scaled
    by the same factor. The agent marks differences that rounding does not explain
    (`partial_samples`, `equal_turns`). If no sample shows any use, the weights are the memory of
    the processes. If that is unknown, all weights are equal.
    """
    total = claimed_bytes = ended = 0
    is_measured = False
    for claim in claims:
        claim.weight = claim.sm_ppm
        total += claim.sm_ppm
        claimed_bytes += claim.memory_bytes
        ended += claim.has_ended
        if claim.is_sampled:
            is_measured = True
    if is_measured and ended and ppm > total:
        missing = ppm - total
        for claim in claims:
            claim.weight = claim.sm_ppm * ended + (missing if claim.has_ended else 0)
        return _PROCESS_UTILIZATION
    # Samples of zero do not measure use on a device that was busy.
    if total or (is_measured and not ppm):
        return _PROCESS_UTILIZATION
    for claim in claims:
        claim.weight = claim.memory_bytes if claimed_bytes else 1
    return _MEMORY_SHARE if claimed_bytes else _EQUAL_SHARE


def split_memory(
    used_bytes: int | None,
    claims: list[Claim],
    limit_bytes: int,
    several: AllocatedParts | None = None,
) -> Split:
    """Split the memory of a row into used and idle bytes.

    Each claim gets the memory of its processes. If all claims together exceed the memory in use,
    they are scaled down. The rest of the memory in use is `unattributed`. But if there is only one
    claim and the driver does not report the memory of its processes, the claim gets everything. The
    memory in use is limited to `limit_bytes`, because readings that are taken one after the other
    may contradict each other.
    """
    total = 0
    for claim in claims:
        total += claim.memory_bytes
        claim.booked_bytes = claim.weight = claim.memory_bytes
    used = total if used_bytes is None else used_bytes
    if used > limit_bytes:  # noqa: PLR1730 - min() costs three times as much, for each GPU and tick
        used = limit_bytes
    split = make_split(used, limit_bytes - used, _MEASURED)
    if several is not None:
        split.divide_idle(split.idle, 1, several)
    if total > used:
        split.method = _SCALED
        numerator, denominator = used, total
        share_out(used, claims, numerator, denominator)
        for claim in claims:
            claim.booked_bytes = claim.part
        return split
    split.unclaimed = used - total
    if len(claims) == 1:
        claim = claims[0]
        if not claim.has_memory and not claim.has_ended:
            # The driver lists the process without its memory, and there is no other claim.
            split.method = _APPORTIONED
            claim.booked_bytes = used
            split.unclaimed = 0
    return split


@lru_cache(maxsize=256)
def idle_milliwatts(model: str | None) -> int | None:
    """Return the idle draw of a product in milliwatts; `None` if it is unknown."""
    name = (model or "").removeprefix("NVIDIA ").removeprefix("Tesla ")
    # Match whole words, the longest first: A1000 is not an A100, H200 NVL is not an H200.
    known = [
        product
        for product in IDLE_MILLIWATTS
        if name == product or name.startswith((f"{product} ", f"{product}-"))
    ]
    return IDLE_MILLIWATTS[max(known, key=len)] if known else None


def energy_of(reading: GpuReading, interval_ns: int) -> Energy | None:
    """Return the energy that a board drew and its idle draw; `None` if energy is not reported."""
    millijoules = reading.energy_millijoules
    if millijoules is None:
        return None
    method = reading.energy_method
    source, draw = _DRAW_MEASURED, reading.idle_draw_milliwatts
    if draw is None:
        source, draw = _DRAW_OF_TABLE, idle_milliwatts(reading.model)
    if draw is None:
        return Energy(millijoules, millijoules, interval_ns, method)
    # A floor above the energy drawn would make active energy, and therefore an entry, negative.
    floor, drawn = interval_ns, NS_PER_SECOND
    floor *= draw
    drawn *= millijoules
    if floor > drawn:
        return Energy(millijoules, millijoules, interval_ns, method, draw, source)
    return Energy(millijoules, draw, NS_PER_SECOND, method, draw, source)


def split_energy(
    energy: Energy,
    busy: Split | None,
    claims: list[Claim],
    interval_ns: int,
    several: AllocatedParts | None = None,
) -> Split:
    """Split the energy of a row into idle energy and the energy of each claim.

    Idle gets the idle draw for the time without a kernel. The claims share the rest in proportion
    to their busy time. If the row was not busy, all energy is idle. If busy time is unknown, all
    energy is `unattributed`.
    """
    split = make_split(energy.millijoules, energy.idle_millijoules, energy.method)
    if busy is not None and busy.used:
        # The product, as C doubles, is an upper bound of all products below.
        size, scale, length = split.used + split.idle + 1, energy.floor_denominator, interval_ns
        if size * scale * length < MAX_PRODUCT:
            small_numerator, small_denominator = energy.floor_numerator, energy.floor_denominator
            _split_draw(
                split, busy.used, claims, interval_ns, small_numerator, small_denominator, several
            )
        else:
            numerator, denominator = energy.floor_numerator, energy.floor_denominator
            _split_draw(split, busy.used, claims, interval_ns, numerator, denominator, several)
        return split
    if busy is None:
        split.unclaimed = split.used
    else:
        split.idle += split.used
        split.used = 0
    if several is not None:
        split.divide_idle(split.idle, 1, several)
    return split


def _split_draw(  # noqa: PLR0917  # by position, as C knows no keywords
    split: Split,
    busy_ns: int,
    claims: list[Claim],
    interval_ns: int,
    floor_numerator: int,
    floor_denominator: int,
    several: AllocatedParts | None,
) -> None:
    """Split the energy of a busy row, given its idle draw per nanosecond as a fraction."""
    drawn, beside, worked = split.used, split.idle, busy_ns
    idle_ns = interval_ns - worked
    idle_exact = idle_ns * floor_numerator
    idle = nearest(idle_ns, floor_numerator, floor_denominator)
    split.used = drawn - idle
    split.idle = idle + beside
    if several is not None:
        exact = idle_exact + beside * floor_denominator
        split.divide_idle(exact, floor_denominator, several)
    if not claims:
        split.unclaimed = split.used
    elif len(claims) == 1:
        claim = claims[0]
        claim.millijoules = split.used
    else:
        for claim in claims:
            claim.weight = claim.busy_ns
        active_exact = drawn * floor_denominator - idle_exact
        floor_denominator *= worked
        share_out(split.used, claims, active_exact, floor_denominator)
        for claim in claims:
            claim.millijoules = claim.part


def _claim_of(category: Category, claims: list[Claim]) -> Claim:
    """Return the claim of the host or of `unattributed`; insert one in order if it is missing."""
    for claim in claims:
        if claim.category is category:
            return claim
    index = len(claims)
    if category is _HOST and claims and claims[-1].category is _UNATTRIBUTED:
        index -= 1
    claim = make_claim(category)
    claims.insert(index, claim)
    return claim


def allocated_times(interval_ns: int, allocated: AllocatedParts) -> list[int]:
    """Return the allocated time of each part of a device in ns; the sum is the interval."""
    if len(allocated.parts) == 1:
        return [interval_ns]
    pieces = [number for _, number in allocated.parts]
    return divide(interval_ns, pieces, interval_ns, allocated.whole)


def _enter(  # noqa: PLR0917  # by position, as C knows no keywords
    claims: list[Claim],
    allocated: AllocatedParts,
    allocated_ns: list[int],
    busy: Split | None,
    memory: Split | None,
    energy: Split | None,
) -> list[Entry]:
    """Return the entries of the claims, then the idle entries."""
    entries = [
        Entry(
            category=claim.category,
            container=claim.container,
            busy_ns=None if busy is None else claim.busy_ns,
            memory_bytes=None if memory is None else claim.booked_bytes,
            energy_millijoules=None if energy is None else claim.millijoules,
            job_id=claim.job_id,
        )
        for claim in claims
    ]
    is_rest_unknown = True if allocated.is_rest_unknown else None
    for index, (allocatee, _) in enumerate(allocated.parts):
        entries.append(
            Entry(
                category=_IDLE,
                busy_ns=None if busy is None else busy.idle_of(index),
                memory_bytes=None if memory is None else memory.idle_of(index),
                energy_millijoules=None if energy is None else energy.idle_of(index),
                allocation=allocatee if isinstance(allocatee, int) else None,
                allocated_ns=allocated_ns[index],
                job_id=allocatee if isinstance(allocatee, str) else None,
                allocation_unknown=is_rest_unknown if allocatee is None else None,
            )
        )
    return entries
