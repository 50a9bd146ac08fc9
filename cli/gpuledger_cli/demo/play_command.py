"""`gpuledger demo --play`: checks its options, writes the days, and prints what the store has.

The table of workloads is the truth of the plan, not read from the store: `gpuledger bill --by
owner` must show the same hours.
"""

import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import yaml

from gpuledger.clock import NS_PER_DAY, NS_PER_MS
from gpuledger.errors import ArgumentError, UserError
from gpuledger.records.base import BaseRecord
from gpuledger.time_ranges import DAYS, begin_of_unit, parse_moment, parse_whole, write_moment
from gpuledger_cli.demo.play import play
from gpuledger_cli.demo.screen import ScreenLine
from gpuledger_cli.demo.tables import TableColumn, fit, line, note_hidden
from gpuledger_cli.in_process.store_directory import make_directory
from gpuledger_cli.long_work import printing_progress, run_cancellable
from gpuledger_reports.presenting.output import efficiency_text
from gpuledger_simulator.fleet.load import load_fleet
from gpuledger_simulator.fleet.plan import FleetPlan, plan_fleet
from gpuledger_simulator.fleet.schema import Fleet
from gpuledger_sinks.store.maintainer import Retention

FLEET: Final = Path(__file__).with_name("month.yaml")
PRICE_FILE: Final = "prices.yaml"
MAX_DAYS: Final = Retention().usage_days
"""Maximum number of days. The store does not keep the minutes of older days."""


class PlayedWorkload(BaseRecord, frozen=True, kw_only=True):
    """The true GPU time of a workload."""

    cluster: str
    """Its cluster."""
    namespace: str
    """Its namespace."""
    owner: str
    """Its kind and name."""
    pods: int
    """Number of its pods."""
    allocated_gpu_seconds: float
    """GPU-seconds that were allocated to it."""
    used_gpu_seconds: float
    """GPU-seconds in which its kernels ran."""


class Played(BaseRecord, frozen=True, kw_only=True):
    """The result of `--play`."""

    store: str
    """Directory of the store."""
    prices: str
    """Price file for the days."""
    begin: str
    """Start of the first day."""
    end: str
    """End of the last day."""
    nodes: int
    """Number of nodes."""
    gpus: int
    """Number of physical GPUs."""
    lost_gpus: int
    """Number of GPUs that were lost."""
    xids: int
    """Number of XIDs on flaky nodes."""
    workloads: list[PlayedWorkload]
    """The workloads, in the order of the fleet."""


@dataclass(frozen=True, kw_only=True)
class Playing:
    """The checked options of `--play`."""

    fleet: Fleet
    begin_ns: int
    days: int
    store: Path


def check_play(
    *, play: str, until: str | None, scenario: Path | None, store: Path | None, now_ns: int
) -> Playing:
    """Return the options; raise `UserError` if one is invalid or missing."""
    days = parse_whole(play, option="--play", unit=DAYS, minimum=1)
    if days > MAX_DAYS:
        raise ArgumentError("--play", f"invalid duration {play!r}; at most {MAX_DAYS}d")
    now_ms = now_ns // NS_PER_MS
    today_ms = begin_of_unit("day", now_ms)
    end_ms = today_ms if until is None else parse_moment(until, option="--until", now_ms=now_ms)
    if end_ms != begin_of_unit("day", end_ms) or end_ms > today_ms:
        raise ArgumentError(
            "--until", f"{until!r} is not the start of a past day, such as {_day(today_ms)}"
        )
    if end_ms < days * DAYS.ms:
        # Bills do not accept earlier times.
        raise ArgumentError("--until", f"{until!r} is less than {play} after the start of 1970")
    if store is None:
        raise UserError("--store: missing; give an empty or new directory with --play")
    fleet = load_fleet(scenario or FLEET)
    found = make_directory(store)
    if any(found.iterdir()):
        raise UserError(f"--store {store}: not empty; give an empty or new directory with --play")
    end_ns = end_ms * NS_PER_MS
    return Playing(fleet=fleet, begin_ns=end_ns - days * NS_PER_DAY, days=days, store=found)


def play_days(playing: Playing) -> Played:
    """Write the days into the store, with a price file for them, and report progress."""
    plan = plan_fleet(playing.fleet, begin_ns=playing.begin_ns, days=playing.days)
    try:
        with printing_progress(plan.days, what="days", done="wrote") as advance:
            run_cancellable(play(plan, str(playing.store), advance=advance))
    except KeyboardInterrupt:
        sys.stderr.write(
            f"gpuledger: interrupted; the store at {playing.store} is incomplete: delete it\n"
        )
        raise
    prices = playing.store / PRICE_FILE
    prices.write_text(price_file(plan))
    return Played(
        store=str(playing.store),
        prices=str(prices),
        begin=_moment(plan, 0),
        end=_moment(plan, plan.minutes),
        nodes=len(plan.nodes),
        gpus=sum(len(node.gpus) for node in plan.nodes),
        lost_gpus=sum(len(node.losses) for node in plan.nodes),
        xids=len(plan.xids),
        workloads=_workloads(plan),
    )


def price_file(plan: FleetPlan) -> str:
    """Return a price file for the days of a plan."""

    def day(share: float) -> str:
        return _day(plan.begin_ns // NS_PER_MS + round(share * plan.days) * DAYS.ms)

    rows = [
        {
            "name": price.name,
            "product": price.product,
            "per_gpu_hour": price.per_gpu_hour,
            **({} if price.since is None else {"from": day(price.since)}),
            **({} if price.until is None else {"to": day(price.until)}),
        }
        for price in plan.fleet.prices
    ]
    content = yaml.safe_dump({"currency": plan.fleet.currency, "prices": rows}, sort_keys=False)
    return f"# Example prices, written by gpuledger demo --play.\n{content}"


def draw_played(played: Played, *, width: int, program: str) -> list[ScreenLine]:
    """Return the lines of the result, with the commands to try next."""
    columns = (
        TableColumn("Workload", "left", floor=18),
        TableColumn("Namespace", "left", floor=9, leaves=1),
        TableColumn("Pods", leaves=2),
        TableColumn("Allocated GPU-h"),
        TableColumn("Used GPU-h"),
        TableColumn("Efficiency", leaves=3),
    )
    rows = [
        [
            each.owner,
            each.namespace,
            str(each.pods),
            f"{each.allocated_gpu_seconds / 3600:,.1f}",
            f"{each.used_gpu_seconds / 3600:,.1f}",
            efficiency_text(each.used_gpu_seconds, each.allocated_gpu_seconds),
        ]
        for each in played.workloads
    ]
    widths = fit(columns, rows, width=width)
    store, prices = shlex.quote(played.store), shlex.quote(played.prices)
    times = f"--from {played.begin} --to {played.end}"
    return [
        ScreenLine(f"{played.begin} to {played.end}: {_facts(played)}"),
        ScreenLine(""),
        ScreenLine("The true GPU time, which a bill by owner must show", "bold"),
        ScreenLine(line(columns, [column.name for column in columns], widths), "bold"),
        *(ScreenLine(line(columns, row, widths)) for row in rows),
        *(ScreenLine(text, "dim") for text in note_hidden(columns, widths, width=width)),
        ScreenLine(""),
        ScreenLine("Next:", "bold"),
        ScreenLine(f"  {program} bill --store {store} {times} --by owner --prices {prices}"),
        ScreenLine(f"  {program} bill --store {store} {times} --by team,model --prices {prices}"),
        ScreenLine(f"  {program} capacity summary --store {store} --prices {prices}"),
    ]


def _facts(played: Played) -> str:
    pods = sum(each.pods for each in played.workloads)
    return (
        f"{played.nodes} nodes, {played.gpus} GPUs, {pods} pods; lost GPUs: {played.lost_gpus};"
        f" XIDs on flaky nodes: {played.xids}"
    )


def _workloads(plan: FleetPlan) -> list[PlayedWorkload]:
    clusters = {pool.name: pool.cluster for pool in plan.fleet.pools}
    pods: dict[tuple[str, str], int] = defaultdict(int)
    allocated: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    used: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for pod in plan.pods:
        key = pod.workload.namespace, pod.workload.name
        truth, size = plan.truth(pod), pod.node.devices[pod.slots[0].device].size
        pods[key] += 1
        allocated[key] += truth.allocated_ns * size
        used[key] += truth.used_ns * size
    return [
        PlayedWorkload(
            cluster=clusters[each.pool],
            namespace=each.namespace,
            owner=f"{each.kind}/{each.name}",
            pods=pods[key],
            allocated_gpu_seconds=float(allocated[key] / 10**9),
            used_gpu_seconds=float(used[key] / 10**9),
        )
        for each in plan.fleet.workloads
        for key in [(each.namespace, each.name)]
    ]


def _moment(plan: FleetPlan, minute: int) -> str:
    return write_moment(plan.time_ns(minute) // NS_PER_MS)


def _day(time_ms: int) -> str:
    return write_moment(time_ms)[:10]
