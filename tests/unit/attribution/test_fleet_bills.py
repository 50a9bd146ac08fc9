"""Bills of fleets equal the rules, applied to raw rows, and what pods requested and ran.

The rules and the truth are computed without the product's booking, SQL and billing.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_SECOND
from gpuledger_reports.pricing.billing import Bill, BillMaker
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.reading.charging_sql import UNITS
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.examples import examples
from tests.fleet import TICK_SECONDS, play_fleet
from tests.fleet_oracle import HOUR_NS, Amounts, LineKey, bill_by_rules, raw_rows
from tests.fleet_scenario import ALWAYS, BEGIN_NS, Fleet, FleetPod, Life, Way
from tests.fleet_truth import Time, allocated_in, unknown_in, used_in

PRICES: Final = "prices: [{name: any, per_gpu_hour: 3600}]\n"
"""A second costs 1."""
HOURS: Final = 2
END: Final = 400.0
ALL_KINDS: Final = Fleet(
    gpus={"hami": 2, "kai": 1, "cgpu": 2, "web": 2, "old": 1, "new": 1},
    pods=[
        FleetPod(name="card-1-busy", node="hami", way="hami", gpu=1, amount=25, uses=1),
        FleetPod(name="card-1-idle", node="hami", way="hami", gpu=1, amount=10, memory_mib=11_517),
        FleetPod(name="card-0-busy", node="hami", way="hami", amount=40, uses=0, life=(95, 285)),
        FleetPod(name="reservation", node="kai", way="reservation"),
        FleetPod(name="half", node="kai", way="kai", amount=50, uses=0),
        FleetPod(name="eighth", node="kai", way="kai", amount=12, life=(0, 215)),
        FleetPod(name="uninvited", node="kai", way="none", uses=0, load=0.5),
        FleetPod(name="chat", node="cgpu", way="gpushare", gpu=1, amount=6, uses=1),
        FleetPod(name="embed", node="cgpu", way="gpushare", gpu=1, amount=12, life=(43, ALWAYS)),
        FleetPod(name="web-0", node="web", gpu=0, uses=0, life=(0, 131)),
        FleetPod(name="web-0", node="web", gpu=1, uses=1, life=(145, ALWAYS)),
        FleetPod(name="before", node="old", uses=0),
        FleetPod(name="guest", node="old", way="none", uses=0),
        FleetPod(name="after", node="new", uses=0, load=0.3, life=(250, ALWAYS)),
    ],
    lives={
        **dict.fromkeys(("hami", "kai", "cgpu", "web"), (0.0, END)),
        "old": (0.0, 150.0),
        "new": (240.0, END),
    },
    moved={"new": "old"},
    unanswered={"web": (200.0, 320.0)},
)


def bill_of(store: Path) -> Bill:
    """Return the bill of the fleet's hours by node, GPU, namespace and pod."""
    read = ReadPolicy(parse_policy(PRICES), "0" * 64, "test")
    reader = UsageReader(str(store), distinguishes_gpus=True)
    begin_us = BEGIN_NS // 1000
    window = Window(begin_us, begin_us + HOURS * HOUR_NS // 1000)
    return BillMaker(reader, read, by=("node", "gpu", "namespace", "pod")).make(window)


def amounts_of(bill: Bill) -> dict[LineKey, Amounts]:
    found = {
        LineKey(*line.values): Amounts(
            **{
                name: Fraction(getattr(line, name), UNITS)
                for name in ("allocated", "used", "billed", "by_others")
            }
        )
        for line in bill.lines
    }
    return {key: line for key, line in found.items() if line != Amounts()}


def differences(one: dict[LineKey, Amounts], other: dict[LineKey, Amounts]) -> list[object]:
    """Return the amounts that differ by more than the remainder of a division in each hour."""
    return [
        (key, name, float(first), float(second))
        for key in sorted({*one, *other})
        for name in ("allocated", "used", "billed", "by_others")
        if abs(
            (first := getattr(one.get(key, Amounts()), name))
            - (second := getattr(other.get(key, Amounts()), name))
        )
        > Fraction(HOURS, UNITS)
    ]


def check(fleet: Fleet, store: Path) -> None:
    """Check the bill of a fleet that was played into a store."""
    bill, by_rules = bill_of(store), bill_by_rules(store)
    billed = amounts_of(bill)
    assert differences(billed, by_rules) == []
    assert present_in(billed) == present_in(by_rules)
    assert bill.line_cost == bill.asset_cost
    assert off_truth(billed, "allocated", allocated_in(fleet)) == []
    assert off_truth(billed, "used", used_in(fleet)) == []
    assert allocated_to(store) <= {
        (uid, fleet.uuid(pod.node, pod.gpu)) for pod, uid in fleet.uids().items()
    }
    unknown = {
        LineKey(node, fleet.uuid(node, gpu), "__unknown__", "__unknown__"): unknown_in(fleet, node)
        for node, count in fleet.gpus.items()
        for gpu in range(count)
    }
    assert off_truth(unknown_of(store), "allocated", unknown) == []
    reservations = {pod.name for pod in fleet.pods if pod.way == "reservation"}
    assert not reservations & {key.pod for key in billed}


def allocated_to(store: Path) -> set[tuple[str, str]]:
    """Return the UIDs of pods and the GPUs that were allocated to them."""
    return {
        (row["allocated_pod_uid"], row["gpu_uuid"])
        for row in raw_rows(store, "usage")
        if row["allocated_pod_uid"]
    }


def present_in(lines: Mapping[LineKey, Amounts]) -> dict[tuple[str, str], Fraction]:
    """Return the time of each GPU in each node."""
    found: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for key, line in lines.items():
        found[key.node, key.gpu] += line.billed
    return found


def unknown_of(store: Path) -> dict[LineKey, Amounts]:
    """Return the time of unknown allocation by the raw rows."""
    found: dict[LineKey, Amounts] = defaultdict(Amounts)
    for row in raw_rows(store, "usage"):
        if row["allocated_pod_state"] == "unknown":
            key = LineKey(row["node"], row["gpu_uuid"], "__unknown__", "__unknown__")
            found[key].allocated += row["allocated_ns"]
    return found


def off_truth(
    lines: Mapping[LineKey, Amounts], name: str, truth: Mapping[LineKey, Time]
) -> list[object]:
    """Return the times that differ from the truth by more than their bounds."""
    found = {key: float(getattr(line, name)) / NS_PER_SECOND for key, line in lines.items()}
    return [
        (key, found.get(key, 0.0), time)
        for key in sorted({*(key for key, seconds in found.items() if seconds), *truth})
        if abs(found.get(key, 0.0) - (time := truth.get(key, Time())).seconds) > time.bound
    ]


def test_a_bill_equals_the_rules_and_the_truth_for_each_way_of_allocation(tmp_path: Path) -> None:
    asyncio.run(play_fleet(ALL_KINDS, tmp_path))
    check(ALL_KINDS, tmp_path)
    billed = {(key.node, key.pod) for key in amounts_of(bill_of(tmp_path))}
    pods = {(pod.node, pod.name) for pod in ALL_KINDS.pods if pod.way != "reservation"}
    assert pods | {("web", "__unknown__"), ("old", "__no_data__")} <= billed


WAYS: Final[tuple[Way, ...]] = ("device", "hami", "kai")
SEVERAL_WAYS: Final[tuple[Way, ...]] = (*WAYS, "gpushare")
"""The ways on nodes with several GPUs. On a node with one GPU, the number of a pod's cGPU ids is an
exact share, and here each pod has one id."""
SHORT_END: Final = 240.0
starts = st.sampled_from([0.0, 33.0, 100.5])
lengths = st.sampled_from([27.0, 60.0, 95.5, ALWAYS])


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Draw nodes with up to two GPUs, and the pods that are allocated shares of them."""
    count = draw(st.integers(1, 2))
    is_moved = draw(st.booleans())
    lives = {"a": (0.0, 110.0 if is_moved else SHORT_END)}
    lives |= {"b": (150.0, SHORT_END)} if is_moved else {}
    pods: list[FleetPod] = []
    for node, life in lives.items():
        way = draw(st.sampled_from(SEVERAL_WAYS if count > 1 else WAYS))
        for gpu in range(count):
            pods += draw(pods_of(node, gpu, way, life))
    silent = draw(st.sampled_from([None, (20.0, 105.0), (60.0, 190.0), (95.0, 130.0)]))
    return Fleet(
        gpus=dict.fromkeys(lives, count),
        pods=pods,
        lives=lives,
        moved={"b": "a"} if is_moved else {},
        unanswered={"a": silent} if silent and silent[1] < lives["a"][1] else {},
    )


@st.composite
def pods_of(draw: st.DrawFn, node: str, gpu: int, way: Way, life: Life) -> list[FleetPod]:
    """Draw the pods of a GPU. Whole GPUs are allocated one after another, to pods of one name."""
    here: dict[str, Any] = {"node": node, "gpu": gpu}
    found = (
        [FleetPod(name=f"{node}-{gpu}-reservation", way="reservation", **here)]
        if way == "kai"
        else []
    )
    amounts = st.sampled_from([3, 6, 12] if way == "gpushare" else [10, 25, 60])
    has_guest, at = draw(st.booleans()), life[0]
    for number in range(draw(st.integers(0, 3))):
        begin = (at if way == "device" else life[0]) + draw(starts)
        end = begin + draw(lengths)
        at = end + draw(st.sampled_from([5.0, 40.0]))
        if begin >= life[1] - 2 * TICK_SECONDS:
            break
        pod = FleetPod(
            name=f"{node}-{gpu}" if way == "device" else f"{node}-{gpu}-{number}",
            way=way,
            amount=100 if way == "device" else draw(amounts),
            uses=draw(st.sampled_from([None, gpu])),
            load=draw(st.sampled_from([0.05, 0.2])),
            life=(begin, end if end < life[1] else ALWAYS),
            **here,
        )
        found.append(pod)
    if has_guest:
        found.append(FleetPod(name=f"{node}-{gpu}-guest", way="none", uses=gpu, load=0.3, **here))
    return found


BORDERLINE: Final = Fleet(
    gpus={"a": 1, "b": 1},
    pods=[
        FleetPod(name="idle", node="a"),
        FleetPod(name="guest", node="a", way="none", uses=0),
        FleetPod(name="b-0", node="b", life=(183, 210)),
    ],
    lives={"a": (0.0, 110.0), "b": (150.0, SHORT_END)},
    moved={"b": "a"},
)
"""The join first takes the guest for the allocatee, and an hour's last sample lists the next hour's
pod."""


@settings(examples(8), derandomize=True)
@given(fleet=fleets())
@example(fleet=BORDERLINE)
def test_the_bill_of_any_fleet_equals_the_rules_and_the_truth(fleet: Fleet) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(play_fleet(fleet, Path(folder)))
        check(fleet, Path(folder))


def test_a_guest_does_not_pay_for_the_idle_pod_that_has_the_gpu(tmp_path: Path) -> None:
    fleet = Fleet(
        gpus={"a": 1},
        pods=[
            FleetPod(name="idle", node="a", life=(0, 95)),
            FleetPod(name="guest", node="a", way="none", uses=0),
        ],
        lives={"a": (0.0, 120.0)},
    )
    asyncio.run(play_fleet(fleet, tmp_path))
    guest = LineKey("a", fleet.uuid("a", 0), "team", "guest")
    assert amounts_of(bill_of(tmp_path))[guest].allocated == 0
