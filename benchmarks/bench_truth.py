"""The error of books against the truth: classes of use, by form of driver and sampling interval.

Each cell plays 92 seconds of a GPU in the simulator, and compares the join's books from the agent's
ticks with the kernels that ran, over every 60 seconds: as ratios of the device's time, memory and
energy. After the table of drivers come classes that do not depend on the driver, on one driver and
with ticks of a second, each with its own figures. The results do not depend on the machine's speed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from benchmarks.figure import Figure
from tests.truth_runs import (
    CLASSES,
    DRIVERS,
    ESTIMATED,
    EVENTS,
    FURTHER,
    MODELLED,
    TICKS_SECONDS,
    UNMEASURED,
    Errors,
    errors_of,
    play_cell,
)

NAME = "truth"
_SEEDS: Final = (1, 2)
_PLAIN: Final = "each window"
_FURTHER_SEEDS: Final = range(1, 9)
_FURTHER_FIGURES: Final = {
    "shorter than a look": "truth_short",
    "contexts that draw": "truth_contexts",
    "kernels of different draw": "truth_draws",
    "a pod an instance of MIG": "truth_instance",
    "two pods in an instance": "truth_shared_instance",
}
_HEADER: Final = (
    f"{'driver':<32} {'class':<24} {'tick':>5} {'GPU-s max':>10} {'mean':>8}"
    f" {'claimed':>8} {'byte-s max':>11} {'joules max':>11} {'unknown':>8} methods"
)


def run() -> Iterator[Figure]:
    """Print the table, a line per cell; yield the largest errors of each group of drivers."""
    print(_HEADER)
    worst = modelled = unmeasured = estimated = claimed = joules = 0.0
    for driver in DRIVERS:
        for kind in CLASSES:
            for sampling_interval_seconds in TICKS_SECONDS:
                cell = _measure(driver, kind, sampling_interval_seconds)
                _print(driver, kind, sampling_interval_seconds, cell)
                off, claimed = cell.largest.busy_ns, max(claimed, cell.claimed)
                if driver in ESTIMATED:
                    estimated = max(estimated, off)
                    continue
                if driver in MODELLED:
                    modelled = max(modelled, off)
                elif driver in UNMEASURED and not kind.startswith("one pod"):
                    unmeasured = max(unmeasured, off)
                    continue
                else:
                    worst = max(worst, off)
                if sampling_interval_seconds == 1:
                    joules = max(joules, cell.largest.millijoules)
    yield Figure(name="truth_measured_max_error_ratio", value=worst, unit="of the device")
    yield Figure(name="truth_modelled_max_error_ratio", value=modelled, unit="of the device")
    yield Figure(name="truth_unmeasured_max_error_ratio", value=unmeasured, unit="of the device")
    yield Figure(name="truth_estimated_max_error_ratio", value=estimated, unit="of the device")
    yield Figure(name="truth_claimed_max_error_ratio", value=claimed, unit="of the device")
    yield Figure(name="truth_joules_max_error_ratio", value=joules, unit="of the device")
    for kind in FURTHER:
        yield from _run_further(kind)
    yield from _run_events()


def _run_events() -> Iterator[Figure]:
    """Print each event's errors and methods; yield the largest error that counts as measured."""
    print(f"{'event':<32} {'tick':>5} {'GPU-s max':>10} {'claimed':>8} {'unknown':>8}  methods")
    claimed = 0.0
    for event in EVENTS:
        for interval in TICKS_SECONDS:
            for seed in _SEEDS:
                played = play_cell(
                    event, DRIVERS[_PLAIN], sampling_interval_seconds=interval, seed=seed
                )
                cell = errors_of(played, sampling_interval_seconds=interval)
                claimed = max(claimed, cell.claimed)
                methods = Counter(str(one) for found in played.methods() for one in found if one)
                counts = ", ".join(f"{name} {count}" for name, count in methods.most_common())
                print(
                    f"{event:<32} {interval:>4.0f}s {cell.largest.busy_ns:>10.2%}"
                    f" {cell.claimed:>8.2%} {cell.unknown:>8.1%}  {counts}",
                    flush=True,
                )
    yield Figure(name="truth_events_claimed_max_error_ratio", value=claimed, unit="of the device")


def _run_further(kind: str) -> Iterator[Figure]:
    """Print the line of a class that is played on one driver; yield its figures."""
    cell, name = _measure(_PLAIN, kind, 1.0, seeds=_FURTHER_SEEDS), _FURTHER_FIGURES[kind]
    _print(_PLAIN, kind, 1.0, cell)
    for suffix, value in (("", cell.largest.busy_ns), ("_joules", cell.largest.millijoules)):
        yield Figure(name=f"{name}{suffix}_max_error_ratio", value=value, unit="of the device")


def _measure(
    driver: str, kind: str, sampling_interval_seconds: float, *, seeds: Iterable[int] = _SEEDS
) -> Errors:
    """Return the worst of several runs of a cell."""
    cells = [
        errors_of(
            play_cell(
                kind,
                DRIVERS[driver],
                sampling_interval_seconds=sampling_interval_seconds,
                seed=seed,
            ),
            sampling_interval_seconds=sampling_interval_seconds,
        )
        for seed in seeds
    ]
    worst = max(cells, key=lambda cell: cell.largest.busy_ns)
    return replace(worst, claimed=max(cell.claimed for cell in cells))


def _print(driver: str, kind: str, sampling_interval_seconds: float, cell: Errors) -> None:
    largest = cell.largest
    print(
        f"{driver:<32} {kind:<24} {sampling_interval_seconds:>4.0f}s {largest.busy_ns:>10.2%}"
        f" {cell.mean.busy_ns:>8.2%} {cell.claimed:>8.2%} {largest.byte_ns:>11.2%}"
        f" {largest.millijoules:>11.2%} {cell.unknown:>8.1%} {', '.join(cell.methods)}",
        flush=True,
    )
