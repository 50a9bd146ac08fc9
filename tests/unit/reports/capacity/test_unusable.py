"""Free GPUs that pods of a mix cannot use, before and after packing."""

import csv
import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_reports.capacity.packing import NodeState, Pod, measure, pack
from gpuledger_reports.capacity.unusable import (
    CPU,
    GPUS,
    MEMORY,
    WHOLE,
    Room,
    Shape,
    find_unusable,
    lacks,
)

TRACES = Path(__file__).parents[3] / "data/traces"
HALF = WHOLE // 2


def by_trial(rooms: Sequence[Room], mix: Mapping[Shape, int]) -> float:
    """Return the mean capacity that pods cannot use, by trying each choice of GPUs of each node."""
    lost = 0
    for shape, number in mix.items():
        for room in rooms:
            usable: set[int] = set()
            if (room.cpu_millicores or 0) >= (shape.cpu_millicores or 0) and (
                (room.memory_bytes or 0) >= (shape.memory_bytes or 0)
            ):
                for chosen in combinations(range(len(room.free)), shape.gpus):
                    if all(room.free[gpu] >= shape.share for gpu in chosen):
                        usable.update(chosen)
            lost += number * sum(free for gpu, free in enumerate(room.free) if gpu not in usable)
    return lost / sum(mix.values())


free = st.sampled_from([0, WHOLE // 10, WHOLE // 4, HALF, WHOLE])
amounts = st.integers(0, 4)
rooms_of = st.lists(
    st.builds(
        Room, st.lists(free, max_size=5).map(lambda each: tuple(sorted(each))), amounts, amounts
    ),
    max_size=4,
)
shapes = st.one_of(
    st.builds(Shape, st.integers(1, 5), st.just(WHOLE), amounts, amounts),
    st.builds(
        Shape, st.just(1), st.sampled_from([WHOLE // 10, WHOLE // 4, HALF]), amounts, amounts
    ),
)
mixes = st.dictionaries(shapes, st.integers(1, 9), min_size=1, max_size=4)


@given(rooms_of, mixes)
def test_unusable_capacity_is_that_of_gpus_that_no_choice_of_gpus_uses(
    rooms: list[Room], mix: dict[Shape, int]
) -> None:
    found = find_unusable(rooms, mix)
    assert found.total == pytest.approx(by_trial(rooms, mix))
    assert 0 <= found.total <= sum(sum(room.free) for room in rooms)
    assert found.total == pytest.approx(sum(found.by_lack.values()))
    assert found.total == pytest.approx(sum(found.by_size.values()))


EMPTY = [Room((WHOLE,) * 4, 8, 8), Room((WHOLE,) * 8, 8, 8)]


def test_nothing_is_unusable_on_empty_nodes_that_fit_all_shapes() -> None:
    mix = {Shape(1): 3, Shape(4, WHOLE, 8, 8): 1, Shape(1, HALF): 5}
    assert find_unusable(EMPTY, mix).total == 0


def test_all_free_gpus_of_a_node_on_which_nothing_fits_are_unusable() -> None:
    mix = {Shape(8): 1, Shape(1, WHOLE, 9): 1, Shape(2, WHOLE, 1, 9): 2}
    found = find_unusable(EMPTY[:1], mix)
    assert found.total == 4 * WHOLE
    assert found.by_lack == {GPUS: WHOLE, CPU: WHOLE, MEMORY: 2 * WHOLE}


@pytest.mark.parametrize(
    ("shape", "unusable"),
    [
        (Shape(1), HALF),
        (Shape(1, HALF), 0),
        (Shape(1, WHOLE // 10), 0),
        (Shape(2), WHOLE + HALF),
        (Shape(2, HALF), 0),
    ],
)
def test_gpus_with_less_left_than_a_pod_that_fits_needs_are_unusable(
    shape: Shape, unusable: int
) -> None:
    assert find_unusable([Room((0, HALF, WHOLE))], {shape: 1}).total == unusable


def test_an_unknown_amount_lacks_nothing() -> None:
    assert find_unusable([Room((WHOLE,), 0, None)], {Shape(1, WHOLE, None, 5): 1}).total == 0


@given(rooms_of, st.lists(shapes, max_size=6))
def test_packing_takes_from_nodes_what_the_pods_need(rooms: list[Room], pods: list[Shape]) -> None:
    packed = pack(rooms, pods)
    if packed is None:
        return
    taken = sum(pod.gpus * pod.share for pod in pods)
    before, after = (sum(sum(room.free) for room in of) for of in (rooms, packed))
    assert before - after == pytest.approx(taken, abs=len(pods) * WHOLE // 20)
    for room in packed:
        assert min((*room.free, room.cpu_millicores or 0, room.memory_bytes or 0)) >= 0


@given(rooms_of, st.lists(st.one_of(st.sampled_from([Shape(1), Shape(1, HALF)]), shapes)))
def test_pods_that_are_packed_together_get_the_nodes_that_they_get_one_after_another(
    rooms: list[Room], pods: list[Shape]
) -> None:
    """A node that lacked something for a pod is not looked at again for an equal one."""

    def size(pod: Shape) -> tuple[int, int, int]:
        return pod.gpus * pod.share, pod.cpu_millicores or 0, pod.memory_bytes or 0

    in_turn: list[Room] | None = rooms
    for pod in sorted(pods, key=size, reverse=True):
        in_turn = None if in_turn is None else pack(in_turn, [pod])
    together = pack(rooms, pods)
    assert (together is None) == (in_turn is None)
    assert Counter(together or ()) == Counter(in_turn or ())


def whole(*gpus: int, **more: Any) -> Pod:  # noqa: ANN401  # any field
    """Return a pod that has whole GPUs."""
    return Pod({f"GPU-{gpu}": WHOLE for gpu in gpus}, **more)


def node(gpus: int, *pods: Pod, cpu: int | None = None) -> NodeState:
    return NodeState(cpu, cpu, gpus={f"GPU-{gpu}" for gpu in range(gpus)}, pods=list(pods))


MIX = {Shape(1): 1, Shape(2): 1}


def test_packed_pods_leave_gpus_together() -> None:
    """Three nodes with one free GPU each; packed, one node has three."""
    found = measure([node(4, whole(0, 1), whole(2)) for _ in range(3)], MIX)
    assert (found.gpus, found.free) == (12, 3)
    assert found.now.total == 1.5 * WHOLE
    assert found.packed.total == 0


def test_pods_of_a_daemon_set_do_not_move() -> None:
    pods = whole(0, 1, is_fixed=True), whole(2, is_fixed=True)
    found = measure([node(4, *pods) for _ in range(3)], MIX)
    assert found.packed == found.now


def test_without_a_better_packing_the_present_state_counts() -> None:
    """Each pod leaves one GPU of its node, wherever it runs."""
    found = measure([node(4, whole(0, 1, 2)) for _ in range(3)], {Shape(3): 1})
    assert found.now.total == found.packed.total == 3 * WHOLE


def test_gpus_may_be_free_and_their_cpus_used() -> None:
    pod = whole(0, cpu_millicores=0, memory_bytes=0)
    found = measure([node(4, pod, cpu=3)], {Shape(1, WHOLE, 4, 0): 1})
    assert found.now.by_lack == {CPU: 3 * WHOLE}
    assert (found.knows_cpu, found.knows_memory) == (True, True)


@pytest.mark.parametrize("unknown", ["node", "pod", "mix"])
def test_cpu_counts_only_if_it_is_known_of_all(unknown: str) -> None:
    known = {name: None if name == unknown else 1 for name in ("node", "pod", "mix")}
    pod = whole(0, cpu_millicores=known["pod"], memory_bytes=0)
    mix = {Shape(1, WHOLE, known["mix"] and 4, 0): 1}
    found = measure([node(2, pod, cpu=known["node"])], mix)
    assert not found.knows_cpu
    assert found.now.total == 0


def test_shares_of_gpus_are_packed() -> None:
    """Two halves on two GPUs; packed, one GPU is whole again."""
    halves = node(2, Pod({"GPU-0": HALF}), Pod({"GPU-1": HALF}))
    found = measure([halves], {Shape(1): 1})
    assert (found.now.total, found.packed.total) == (WHOLE, 0)


def rows_of(name: str) -> list[dict[str, int]]:
    data = (TRACES / name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    return [
        {column: int(value) for column, value in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]


def openb_nodes(*, one_of: int) -> list[NodeState]:
    """Return a part of the cluster's nodes."""
    kinds = [row for row in rows_of("openb_nodes.csv") for _ in range(row["nodes"])]
    return [
        NodeState(
            row["cpu_milli"], row["memory_mib"], gpus={f"GPU-{gpu}" for gpu in range(row["gpu"])}
        )
        for row in kinds[::one_of]
    ]


def place(nodes: Sequence[NodeState], shape: Shape) -> tuple[NodeState, Pod] | None:
    """Place a pod on the first node on which it fits, on the fullest GPUs."""
    node = next((node for node in nodes if lacks(node.room, shape) is None), None)
    if node is None:
        return None
    left = {gpu: WHOLE - sum(pod.gpus.get(gpu, 0) for pod in node.pods) for gpu in node.gpus}
    fitting = sorted((free, gpu) for gpu, free in left.items() if free >= shape.share)
    pod = Pod({gpu: shape.share for _, gpu in fitting[: shape.gpus]}, *shape[2:])
    change(node, pod, -1)
    if shape.gpus:
        node.pods.append(pod)
    return node, pod


def change(node: NodeState, pod: Pod, sign: int) -> None:
    node.cpu_millicores = (node.cpu_millicores or 0) + sign * (pod.cpu_millicores or 0)
    node.memory_bytes = (node.memory_bytes or 0) + sign * (pod.memory_bytes or 0)


def replayed(nodes: Sequence[NodeState], pods: Sequence[tuple[Shape, int, int]]) -> Iterator[int]:
    """Start and end pods on nodes in order of time; yield after each start."""
    running: dict[int, tuple[NodeState, Pod]] = {}
    events = [(end, False, number) for number, (_, _, end) in enumerate(pods)]
    events += [(begin, True, number) for number, (_, begin, _) in enumerate(pods)]
    for _, is_start, number in sorted(events):
        if is_start:
            placed = place(nodes, pods[number][0])
            if placed is not None:
                running[number] = placed
            yield number
        elif number in running:
            node, pod = running.pop(number)
            node.pods = [each for each in node.pods if each is not pod]
            change(node, pod, 1)


def test_unusable_gpus_of_a_real_cluster_are_those_that_a_trial_of_each_choice_finds() -> None:
    """Pods of the trace on a fiftieth of its nodes, which they fill."""
    nodes = openb_nodes(one_of=50)
    pods = [
        (
            Shape(row["num_gpu"], row["gpu_milli"] * 1000, row["cpu_milli"], row["memory_mib"]),
            row["scheduled_time"],
            row["deletion_time"],
        )
        for row in rows_of("openb_pods.csv.gz")
    ]
    mix = Counter(shape for shape, _, _ in pods if shape.gpus)
    gains, lacking = [], set[str]()
    for count, _ in enumerate(replayed(nodes, pods)):
        if count % 900 != 450:
            continue
        found = measure(nodes, mix)
        assert found.now.total == pytest.approx(by_trial([node.room for node in nodes], mix))
        assert 0 <= found.packed.total <= found.now.total <= found.free * WHOLE
        assert found.knows_cpu
        gains.append(found.now.total - found.packed.total)
        lacking |= found.now.by_lack.keys()
    assert max(gains) > WHOLE
    assert lacking == {GPUS, CPU, MEMORY}
