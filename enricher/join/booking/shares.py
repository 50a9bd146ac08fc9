"""The books of one row of a tick: who was on the GPU, and what is booked on whom. Pure.

How it works. The processes on a GPU become claims, one for each container, one for the host and one
for those of which nothing could be read (`gather_claims`). Each quantity is then split on its own:

- busy time (`split_busy`), by what the driver sampled of the processes, else by memory held, else
  in equal parts;
- memory (`split_memory`), by what the processes hold;
- energy (`split_energy`): idle has the idle draw of the time in which no kernel ran; the rest goes
  by busy time.

A split says what each claim has, what is used and nobody claims, and what is idle, by who holds it.
`book_gpu` makes entries of the three splits in an order that readers may count on: pods' containers
by UID and container id, the host, nobody's, and idle by who holds it, what nobody holds last.
Whatever is read, the entries of a quantity sum to the device; of a quantity that the driver does
not give, nothing is booked: absent is not zero.

The arithmetic is the contract: a replay must give the same bytes, compiled or not. All of it is in
whole numbers, ratios in parts per million. An entry is its exact share, a fraction, rounded up or
down so that the sum is whole (`gpuledger.ledger.division`): of equal claims the first in the order
above has the unit that is left. Nothing depends on the order in which a tick names processes,
containers or allocations. This is the join's hottest code, some forty entries a tick, and is
compiled with the types in `shares.pxd` (ADR 019). That is why the classes here are plain ones:
their fields are C.

How rows of a GPU that is cut by MIG are told apart, and which holder has which part, is known
elsewhere (`books`, `gpuledger.ledger.holders`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.ledger.division import PPM, divide, part_of, parts_per_million
from gpuledger.ledger.holders import NOBODYS, HeldParts
from gpuledger.ledger.quantities import rates_of
from gpuledger.records import (
    Account,
    BusyMethod,
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

# Looked up once: an enum's member costs as much as the multiplication for which it stands.
_POD: Final = Account.POD
_HOST: Final = Account.HOST
_UNATTRIBUTED: Final = Account.UNATTRIBUTED
_IDLE: Final = Account.IDLE
_EXCLUSIVE: Final = BusyMethod.EXCLUSIVE
_PROCESS_UTILIZATION: Final = BusyMethod.PROCESS_UTILIZATION
_MEMORY_SHARE: Final = BusyMethod.MEMORY_SHARE
_EQUAL_SHARE: Final = BusyMethod.EQUAL_SHARE
_MEASURED: Final = MemoryMethod.MEASURED
_SCALED: Final = MemoryMethod.SCALED
_APPORTIONED: Final = MemoryMethod.APPORTIONED
_DRAW_MEASURED: Final = IdleDrawSource.MEASURED
_DRAW_OF_TABLE: Final = IdleDrawSource.TABLE

# Claims that no position in the tick's `containers` stands for.
_HOST_KEY, _NOBODY_KEY = -1, -2

# A board's draw without a process and without a kernel, as nvidia-smi showed them on machines whose
# listings are public: the low end, as a floor too high would take from idle what work drew.
_IDLE_MILLIWATTS: Final = {
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
LISTED_PRODUCTS: Final = len(_IDLE_MILLIWATTS)


class Claim:
    """One account's claim on one GPU in one tick, summed over its processes there."""

    __slots__ = ("account", "container", "has_ended", "memory_bytes", "sm_ppm")

    def __init__(
        self,
        account: Account,
        container: int | None = None,
        sm_ppm: int | None = None,
        memory_bytes: int | None = None,
        has_ended: bool = False,  # noqa: FBT001, FBT002  # by position, as keywords cost more
    ) -> None:
        self.account = account
        """`pod`, `host`, or `unattributed` for processes of which nothing could be read."""
        self.container = container
        """On a pod's: position of its container in the tick's `containers`."""
        self.sm_ppm = sm_ppm
        """Sum of its processes' SM utilization, in parts per million; absent where the driver gave
        none of them."""
        self.memory_bytes = memory_bytes
        """Device memory of its processes at the tick; absent where the driver gave none of them."""
        self.has_ended = has_ended
        """Whether one of its processes ended within the tick."""

    def add(self, process: GpuProcess) -> None:
        """Add what is known of one process; one that ended holds no memory any more."""
        if process.sm_utilization_ratio is not None:
            self.sm_ppm = (self.sm_ppm or 0) + parts_per_million(process.sm_utilization_ratio)
        if process.ended:
            self.has_ended = True
        elif process.memory_used_bytes is not None:
            self.memory_bytes = (self.memory_bytes or 0) + process.memory_used_bytes


class Split:
    """One quantity of a row, split between the claims, nobody and idle."""

    __slots__ = ("idle", "method", "of_claims", "unclaimed", "used")

    def __init__(
        self,
        used: int,
        of_claims: list[int],
        unclaimed: int,
        idle: list[int],
        method: Any,  # noqa: ANN401  # of the quantity's own enumeration
    ) -> None:
        self.used = used
        """What is not idle."""
        self.of_claims = of_claims
        """What each claim has, in their order."""
        self.unclaimed = unclaimed
        """What of that nobody claims."""
        self.idle = idle
        """What is idle, by the parts in which the device is held."""
        self.method = method
        """How it was found."""


class Energy:
    """The energy of one row of a tick, and how much of it would have been drawn idle."""

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
        """What is split between those that were busy and idle."""
        self.floor_numerator = floor_numerator
        self.floor_denominator = floor_denominator
        """Over this, what it would have drawn idle in a nanosecond: never more than it drew."""
        self.method = method
        """How it was found."""
        self.idle_draw_milliwatts = idle_draw_milliwatts
        """The board's idle draw from which that comes, where it is known."""
        self.idle_draw_source = idle_draw_source
        """Where that is from."""
        self.idle_millijoules = idle_millijoules
        """What is idle's anyway, beside it."""


def book_gpu(  # noqa: PLR0917  # by position, as keywords cost more
    reading: GpuReading,
    own: GpuReading,
    claims: list[Claim],
    interval_ns: int,
    energy: Energy | None,
    held: HeldParts = NOBODYS,
) -> GpuBooks:
    """Return the books of one row: entries of the claims, the host, nobody, and idle.

    `own` is the reading of only what is the row's own. Busy time sums to the interval, memory to
    the total memory, energy to `energy`; a quantity that the driver does not give is absent from
    all entries. Idle has an entry for each container that holds a part of the GPU, and one for what
    nobody holds.
    """
    busy = split_busy(own.utilization_ratio, claims, interval_ns, held)
    reserved_bytes = 0
    memory = None
    if own.memory_total_bytes is not None:
        # What the driver keeps for itself is in use, and no process's; readings may contradict.
        reserved_bytes = min(own.memory_reserved_bytes or 0, own.memory_total_bytes)
        limit_bytes = own.memory_total_bytes - reserved_bytes
        memory = split_memory(own.memory_used_bytes, claims, limit_bytes, held)
    joules = None if energy is None else split_energy(energy, busy, claims, interval_ns, held)
    splits = [split for split in (busy, memory, joules) if split is not None]
    if memory is not None and reserved_bytes:
        memory.of_claims[_place_of(_HOST, claims, splits)] += reserved_bytes
    if _has_unclaimed(splits) or (not (busy and busy.used) and any(rates_of(reading))):
        # Apportioned quantities go by busy time: where there is none, they need an entry to go to.
        place = _place_of(_UNATTRIBUTED, claims, splits)
        for split in splits:
            split.of_claims[place] += split.unclaimed
    return GpuBooks(
        # As the node gave it: readers see the board's memory, whatever this row was booked.
        reading=reading,
        entries=_enter(claims, held, busy, memory, joules),
        busy_method=None if busy is None else busy.method,
        memory_method=None if memory is None else memory.method,
        energy_method=None if energy is None else energy.method,
        idle_draw_milliwatts=None if energy is None else energy.idle_draw_milliwatts,
        idle_draw_source=None if energy is None else energy.idle_draw_source,
    )


def gather_claims(sample: NodeSample) -> list[list[Claim]]:
    """Return the claims on each GPU of the tick, in the order of its `gpus`.

    Pods' come first, by UID and container id, then the host's, then nobody's. A process without a
    container, or whose container shows neither id nor pod, is the host's. One whose start could not
    be read either was gone before it could be looked at: nobody's. Raises `IndexError` where a
    process points to a GPU or a container that the tick does not have.
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
            on_gpu[key] = claim = Claim(
                _POD if key >= 0 else _HOST if key == _HOST_KEY else _UNATTRIBUTED,
                key if key >= 0 else None,
            )
        claim.add(process)
    return [
        _in_order(on_gpu, sample.containers) if len(on_gpu) > 1 else list(on_gpu.values())
        for on_gpu in found
    ]


def _in_order(on_gpu: dict[int, Claim], containers: Sequence[ContainerRef]) -> list[Claim]:
    """Return claims by whose they are, never by when their processes came."""
    pods: list[tuple[str, str, int, int, bool, int]] = []
    for key, claim in on_gpu.items():
        if key >= 0:
            ref = containers[key]
            sm_ppm = -1 if claim.sm_ppm is None else claim.sm_ppm
            memory_bytes = -1 if claim.memory_bytes is None else claim.memory_bytes
            # A container is named once; where it is not, what is claimed for it tells them apart.
            pods.append(
                (
                    ref.pod_uid or "",
                    ref.container_id or "",
                    sm_ppm,
                    memory_bytes,
                    claim.has_ended,
                    key,
                )
            )
    pods.sort()
    claims = [on_gpu[pod[5]] for pod in pods]
    if _HOST_KEY in on_gpu:
        claims.append(on_gpu[_HOST_KEY])
    if _NOBODY_KEY in on_gpu:
        claims.append(on_gpu[_NOBODY_KEY])
    return claims


def are_unmeasured(claims: Sequence[Claim]) -> bool:
    """Return whether the driver gave no utilization of any process."""
    for claim in claims:  # noqa: SIM110 - all() costs three times as much, for each GPU and tick
        if claim.sm_ppm is not None:
            return False
    return True


def split_busy(
    utilization_ratio: float | None, claims: list[Claim], interval_ns: int, held: HeldParts
) -> Split | None:
    """Split the time in which kernels ran; `None` where the driver said nothing of it."""
    if utilization_ratio is not None:
        ppm = parts_per_million(utilization_ratio)
    elif are_unmeasured(claims):
        return None
    else:
        ppm = 0
        for claim in claims:
            ppm += claim.sm_ppm or 0
    # Processes that overlap add up to more than the tick; a device is never busy for longer.
    if ppm > PPM:  # noqa: PLR1730 - min() costs three times as much, for each GPU and tick
        ppm = PPM
    busy_ns = part_of(interval_ns, ppm, PPM)
    idle = _divide_idle(interval_ns - busy_ns, (PPM - ppm) * interval_ns, PPM, held)
    if not claims:
        return Split(busy_ns, [], busy_ns, idle, _EXCLUSIVE)
    if len(claims) == 1:
        return Split(busy_ns, [busy_ns], 0, idle, _EXCLUSIVE)
    weights, method = _weigh(claims, ppm)
    total = 0
    for weight in weights:
        total += weight
    # Without any weight there is nothing to be split either.
    parts = divide(busy_ns, weights, ppm * interval_ns, PPM * total) if total else weights
    return Split(busy_ns, parts, 0, idle, method)


def _weigh(claims: list[Claim], ppm: int) -> tuple[list[int], BusyMethod]:
    """Return by what several claims share the time in which kernels ran, a part of the tick.

    They have what the driver sampled of their processes. Its process samples end with the process,
    so the kernels of the last moments of a process that ended show on the device only: what is
    missing is its. Otherwise the difference is rounding (whole percents on both sides), and spread
    in proportion. Without a measure of use, memory held is the next best; without that, equal
    parts.
    """
    total = held = ended = 0
    for claim in claims:
        total += claim.sm_ppm or 0
        held += claim.memory_bytes or 0
        ended += claim.has_ended
    is_measured = not are_unmeasured(claims)
    if is_measured and ended and ppm > total:
        missing = ppm - total
        return [
            (claim.sm_ppm or 0) * ended + (missing if claim.has_ended else 0) for claim in claims
        ], _PROCESS_UTILIZATION
    # Where samples say that nobody was busy, and the device was, they are no measure of it.
    if total or (is_measured and not ppm):
        return [claim.sm_ppm or 0 for claim in claims], _PROCESS_UTILIZATION
    if held:
        return [claim.memory_bytes or 0 for claim in claims], _MEMORY_SHARE
    return [1] * len(claims), _EQUAL_SHARE


def split_memory(
    used_bytes: int | None, claims: list[Claim], limit_bytes: int, held: HeldParts
) -> Split:
    """Split the bytes in use.

    What the processes hold is theirs, scaled down where they claim more than is in use. The rest
    is nobody's, unless the driver tells no process's memory and there is only one claim. Never more
    than `limit_bytes`: readings taken one after the other need not agree.
    """
    of_claims = [claim.memory_bytes or 0 for claim in claims]
    total = 0
    for claimed in of_claims:
        total += claimed
    used = total if used_bytes is None else used_bytes
    if used > limit_bytes:  # noqa: PLR1730 - min() costs three times as much, for each GPU and tick
        used = limit_bytes
    free = limit_bytes - used
    idle = _divide_idle(free, free, 1, held)
    if total > used:
        return Split(used, divide(used, of_claims, used, total), 0, idle, _SCALED)
    if len(claims) == 1 and claims[0].memory_bytes is None and not claims[0].has_ended:
        # The driver lists the process without its memory, and nobody else is there to have it.
        return Split(used, [used], 0, idle, _APPORTIONED)
    return Split(used, of_claims, used - total, idle, _MEASURED)


@lru_cache(maxsize=256)
def idle_milliwatts(model: str | None) -> int | None:
    """Return the idle draw of a product; `None` where it is not known."""
    name = (model or "").removeprefix("NVIDIA ").removeprefix("Tesla ")
    # Whole words alone, and the longest that fit: an A1000 is no A100, an H200 NVL is no H200.
    known = [
        product
        for product in _IDLE_MILLIWATTS
        if name == product or name.startswith((f"{product} ", f"{product}-"))
    ]
    return _IDLE_MILLIWATTS[max(known, key=len)] if known else None


def energy_of(reading: GpuReading, interval_ns: int) -> Energy | None:
    """Return what a board drew; `None` where it does not say."""
    millijoules = reading.energy_millijoules
    if millijoules is None:
        return None
    method = reading.energy_method
    source, draw = _DRAW_MEASURED, reading.idle_draw_milliwatts
    if draw is None:
        source, draw = _DRAW_OF_TABLE, idle_milliwatts(reading.model)
    if draw is None:
        return Energy(millijoules, millijoules, interval_ns, method)
    # A floor above what was drawn would make the active draw, and somebody's energy, negative.
    if draw * interval_ns > millijoules * NS_PER_SECOND:
        return Energy(millijoules, millijoules, interval_ns, method, draw, source)
    return Energy(millijoules, draw, NS_PER_SECOND, method, draw, source)


def split_energy(
    energy: Energy, busy: Split | None, claims: list[Claim], interval_ns: int, held: HeldParts
) -> Split:
    """Split the energy by time.

    Idle has the idle draw of the time in which no kernel ran; all else goes to those that were
    busy, in proportion. Where nobody was, all is idle's; where that is not known, all is nobody's.
    """
    millijoules, beside, method = energy.millijoules, energy.idle_millijoules, energy.method
    if busy is None:
        of_idle = _divide_idle(beside, beside, 1, held)
        return Split(millijoules, [0] * len(claims), millijoules, of_idle, method)
    if not busy.used:
        of_idle = _divide_idle(millijoules + beside, millijoules + beside, 1, held)
        return Split(0, [0] * len(claims), 0, of_idle, method)
    idle_ns, denominator = interval_ns - busy.used, energy.floor_denominator
    idle_exact = idle_ns * energy.floor_numerator
    idle = part_of(idle_ns, energy.floor_numerator, denominator)
    active = millijoules - idle
    of_idle = _divide_idle(idle + beside, idle_exact + beside * denominator, denominator, held)
    if not claims:
        return Split(active, [], active, of_idle, method)
    if len(claims) == 1:
        return Split(active, [active], 0, of_idle, method)
    active_exact = millijoules * denominator - idle_exact
    parts = divide(active, busy.of_claims, active_exact, denominator * busy.used)
    return Split(active, parts, 0, of_idle, method)


def _divide_idle(total: int, numerator: int, denominator: int, held: HeldParts) -> list[int]:
    """Return what each part has in which the device is held; exactly, the total is a fraction."""
    if len(held.parts) == 1:
        return [total]
    pieces = [number for _, number in held.parts]
    return divide(total, pieces, numerator, denominator * held.whole)


def _place_of(account: Account, claims: list[Claim], splits: list[Split]) -> int:
    """Return where the host's claim stands, or nobody's; where there is none, it is put there."""
    for place, claim in enumerate(claims):
        if claim.account is account:
            return place
    place = len(claims)
    if account is _HOST and claims and claims[-1].account is _UNATTRIBUTED:
        place -= 1
    claims.insert(place, Claim(account))
    for split in splits:
        split.of_claims.insert(place, 0)
    return place


def _has_unclaimed(splits: list[Split]) -> bool:
    for split in splits:  # noqa: SIM110 - any() costs three times as much, for each GPU and tick
        if split.unclaimed:
            return True
    return False


def _enter(
    claims: list[Claim],
    held: HeldParts,
    busy: Split | None,
    memory: Split | None,
    energy: Split | None,
) -> list[Entry]:
    """Return the entries of what is claimed, and of what is idle."""
    entries = [
        Entry(
            account=claim.account,
            container=claim.container,
            busy_ns=None if busy is None else busy.of_claims[index],
            memory_bytes=None if memory is None else memory.of_claims[index],
            energy_millijoules=None if energy is None else energy.of_claims[index],
        )
        for index, claim in enumerate(claims)
    ]
    for index, (allocation, _) in enumerate(held.parts):
        entries.append(
            Entry(
                account=_IDLE,
                busy_ns=None if busy is None else busy.idle[index],
                memory_bytes=None if memory is None else memory.idle[index],
                energy_millijoules=None if energy is None else energy.idle[index],
                allocation=allocation,
            )
        )
    return entries
