"""The rules of billing in plain Python: one physical GPU and hour at a time, only integers.

`gpuledger_reports.reading.charging_sql` has the same in SQL.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpuledger_reports.reading.charging_sql import UNITS
from tests.unit.reports.stores import HOUR_NS

UNKNOWN, NOBODY = "", " "
"""The allocatees that are no tenants, in the order in which SQL sorts all allocatees."""
KINDS = ("unused", "overhead", "idle", "no_data", "unknown")
Row = Mapping[str, Any]


class Claim(NamedTuple):
    """The basis by which a tenant is billed."""

    basis: str = "allocated"
    weight: int = 0
    weight_of: int = 1


def factor_of(row: Row) -> int:
    """Return the units of a nanosecond of a row's device."""
    if slices := row.get("gpu_compute_slices"):
        return int(row["compute_slices"] or 0) * (UNITS // int(slices))
    return 0 if row.get("parent_uuid") else UNITS


def device_of(row: Row) -> Any:  # noqa: ANN401  # any hashable and sortable value
    """Return the identity of a row's device, in the order in which SQL sorts devices."""
    shape = [row.get(name) for name in ("mig_profile", "compute_slices", "gpu_compute_slices")]
    # Absent values come last.
    return (row["gpu_uuid"], *((value is None, value) for value in shape))


def fit(amounts: Mapping[Any, int], to: int) -> dict[Any, int]:
    """Return amounts scaled down to sum to no more than `to`, by largest remainder."""
    total = sum(amounts.values())
    if total <= to:
        return dict(amounts)
    parts = {key: divmod(amount * to, total) for key, amount in amounts.items()}
    fitted = {key: floor for key, (floor, _) in parts.items()}
    left = to - sum(fitted.values())
    for key in sorted(parts, key=lambda key: (-parts[key][1], key))[:left]:
        fitted[key] += 1
    return fitted


class Charged(NamedTuple):
    """The units of physical GPUs."""

    billed: Counter[str]
    """By tenant and by kind of idle."""
    by_others: Counter[tuple[str, str]]
    """Used without an allocation, by user and allocatee."""
    paid: Counter[tuple[str, str]]
    """The part that is billed to an allocatee that pays by allocated time."""


def charge_gpu_hour(
    rows: Sequence[Row], there_ns: int, claim_of: Callable[[str], Claim]
) -> Charged:
    """Return the units of a physical GPU's hour.

    `there_ns` is its time in the inventory; 0 if the inventory does not list it in that hour.
    """
    allocated: dict[tuple[Any, str], int] = defaultdict(int)
    unresponsive: dict[tuple[Any, str], int] = defaultdict(int)
    used: dict[tuple[Any, str], int] = defaultdict(int)
    for row in rows:
        if row["category"] == "idle":
            nobody = UNKNOWN if row.get("allocated_pod_state") == "unknown" else NOBODY
            key = (device_of(row), row.get("allocated_pod_uid") or nobody)
            allocated[key] += row.get("allocated_ns", 0) * factor_of(row)
            unresponsive[key] += (row.get("unresponsive_ns") or 0) * factor_of(row)
        else:
            who = row.get("pod_uid") or row["category"]
            used[device_of(row), who] += (row["busy_ns"] or 0) * factor_of(row)
    covered = sum(allocated.values())
    there = there_ns * UNITS or min(covered, HOUR_NS * UNITS)
    fitted = fit(allocated, there)

    def scaled(amount: int) -> int:
        amount = max(0, amount)
        return amount * there // covered if covered > there else amount

    charged = Charged(Counter(), Counter(), Counter())
    for device in {device for device, _ in (*allocated, *used)}:
        charge_device(
            {who: units for (of, who), units in fitted.items() if of == device},
            {who: scaled(units) for (of, who), units in unresponsive.items() if of == device},
            {who: scaled(units) for (of, who), units in used.items() if of == device},
            claim_of,
            charged,
        )
    charged.billed["no_data"] += there - sum(fitted.values())
    return Charged(+charged.billed, +charged.by_others, +charged.paid)


def charge_device(
    allocated: Mapping[str, int],
    unresponsive: Mapping[str, int],
    used: Mapping[str, int],
    claim_of: Callable[[str], Claim],
    charged: Charged,
) -> None:
    billed = charged.billed
    lost = {who: min(unresponsive.get(who, 0), units) for who, units in allocated.items()}
    billed["overhead"] += sum(lost.values())
    own = {who: units - lost[who] for who, units in allocated.items()}
    unknown, usable = own.get(UNKNOWN, 0), sum(own.values())
    free = own.get(NOBODY, 0) + unknown
    holders = {who for who, units in own.items() if units and who not in (NOBODY, UNKNOWN)}
    claims = {}
    for who in holders:
        basis, weight, weight_of = claim_of(who)
        use = used.get(who, 0)
        claims[who] = {
            "allocated": own[who],
            "used": use,
            "greater": max(own[who], use),
            "blended": (weight * own[who] + (weight_of - weight) * use) // weight_of,
        }[basis]
    others = {who: use for who, use in used.items() if who not in holders}
    fitting = fit(others, free)
    claims |= fitting
    allocatees = {
        who: units for who, units in allocated.items() if units and who not in (NOBODY, UNKNOWN)
    }
    granted = fit(claims, usable)
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    for user, use in others.items():
        if user not in {"host", "unattributed", *allocatees}:
            for allocatee, units in fit(allocatees, use - fitting[user]).items():
                charged.by_others[user, allocatee] += units
                parts[allocatee][user] = units
    for allocatee, by_user in parts.items():
        pays = granted.get(allocatee, 0) if claim_of(allocatee).basis == "allocated" else 0
        for user, units in fit(by_user, pays).items():
            charged.paid[user, allocatee] += units
    for who, units in granted.items():
        billed["overhead" if who in ("host", "unattributed") else who] += units
    left_over = usable - sum(granted.values())
    held_back = max(0, usable - free - sum(granted[who] for who in holders))
    billed["unused"] += min(left_over, held_back)
    left_over -= min(left_over, held_back)
    # Only time that is known to be unallocated is idle.
    billed["unknown"] += min(left_over, unknown)
    billed["idle"] += left_over - min(left_over, unknown)
