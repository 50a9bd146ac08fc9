"""`gpuledger inspect`: each node's newest event, as the tables of `kubectl inspect cgpu`."""

from gpuledger.records import Category, PodState
from gpuledger_cli.inspection.inspect_command import explain_absent, is_selected, read_newest
from gpuledger_cli.inspection.shares import (
    as_objects,
    detail_lines,
    node_of,
    old_hints,
    summary_lines,
    unnamed_hints,
)
from tests.tables import for_each
from tests.unit.sinks.builders import (
    GPU,
    SECOND_NS,
    START_NS,
    books,
    bus,
    entry,
    event,
    holder,
    pod,
    publish,
    reading,
)

GIB = 2**30
IDLE = Category.IDLE
SHARED = event(
    gpus=[
        books(
            reading(),
            entry(memory_bytes=16 * GIB, busy_ns=SECOND_NS * 3 // 10),
            entry(Category.HOST, memory_bytes=GIB // 2, busy_ns=0),
            entry(IDLE, allocation=0, allocated_ns=SECOND_NS // 4),
            entry(IDLE, allocation=1, allocated_ns=SECOND_NS // 2),
            entry(IDLE, allocated_ns=SECOND_NS // 4),
        ),
        books(
            reading(uuid="GPU-2", index=1),
            entry(IDLE, allocated_ns=SECOND_NS),
        ),
    ],
    allocated_to=[pod(), holder()],
)
"""A GPU of which `train-0` has a quarter and `notebook-0` half, and a free GPU; 80 GiB each."""


def test_the_summary_shows_allocated_used_and_total_memory_by_gpu() -> None:
    single = event(node="node-b", gpus=[books(reading(), entry(IDLE, allocated_ns=SECOND_NS))])

    lines = list(summary_lines([node_of(SHARED), node_of(single)]))
    assert [line.split() for line in lines] == [
        ["NODE", "GPU0(Allocated/Used/Total)", "GPU1(Allocated/Used/Total)", "GPU", "Memory(GiB)"],
        ["node-a", "60.0/16.5/80.0", "0.0/0.0/80.0", "60.0/16.5/160.0"],
        ["node-b", "0.0/0.0/80.0", "-", "0.0/0.0/80.0"],
        ["-" * len(lines[0])],
        ["Allocated/Used/Total", "GPU", "memory", "of", "all", "nodes", "(GiB):"],
        ["60.0/16.5/240.0", "(25%", "allocated)"],
    ]


def test_the_details_show_the_share_and_the_use_of_each_pod() -> None:
    assert [line.split() for line in detail_lines([node_of(SHARED)])] == [
        ["NODE:", "node-a"],
        [],
        ["POD", "GPU0(Allocated/Used,", "Busy)", "GPU1(Allocated/Used,", "Busy)"],
        ["__host__", "0.0/0.5,", "0%", "-"],
        ["research/notebook-0", "40.0/0.0,", "0%", "-"],
        ["research/train-0", "20.0/16.0,", "30%", "-"],
        [],
        ["Allocated", ":", "60.0", "GiB", "(38%)"],
        ["Used", ":", "16.5", "GiB", "(10%)"],
        ["Total", ":", "160.0", "GiB"],
    ]


def test_the_shares_in_json_are_ratios_and_bytes() -> None:
    (node,) = as_objects([node_of(SHARED)])

    assert (node["cluster"], node["node"], node["time_ns"]) == ("default", "node-a", START_NS)
    gpu, free = node["devices"]
    assert (gpu["gpu_uuid"], free["users"]) == (GPU, [])
    assert gpu["users"][2] == {
        "name": "research/train-0",
        "allocated_ratio": 0.25,
        "memory_allocated_bytes": 20 * GIB,
        "memory_used_bytes": 16 * GIB,
        "busy_ratio": 0.3,
    }


def test_the_instances_of_a_partitioned_gpu_are_one_column_and_their_pods_have_their_own() -> None:
    instances = [
        books(
            reading(
                uuid=f"MIG-{number}",
                parent_uuid=GPU,
                gpu_instance=number,
                mig_profile="3g.40gb",
                memory_total_bytes=40 * GIB,
            ),
            entry(IDLE, allocation=number, allocated_ns=SECOND_NS),
        )
        for number in range(2)
    ]
    node = node_of(
        event(
            gpus=[books(reading(mig_enabled=True)), *instances],
            allocated_to=[holder("a"), holder("b")],
        )
    )

    assert list(summary_lines([node]))[1].split() == ["node-a", *["80.0/0.0/80.0"] * 2]
    head, first, second = list(detail_lines([node]))[2:5]
    assert head.count("GPU0/3g.40gb(") == 2
    assert first.split() == ["research/a", "40.0/0.0,", "0%", "-"]
    assert second.split() == ["research/b", "-", "40.0/0.0,", "0%"]


def test_names_that_are_unknown_and_allocations_that_are_unknown_are_shown() -> None:
    unnamed = pod(state=PodState.PENDING, namespace=None, name=None)
    shown = event(
        gpus=[
            books(
                reading(),
                entry(),
                entry(IDLE, allocated_ns=SECOND_NS // 2, allocation_unknown=True),
                entry(IDLE, allocated_ns=SECOND_NS // 2, job_id="7"),
            )
        ],
        pods=[unnamed],
    )
    assert {*node_of(shown).devices[0].users} == {"pod uid-train", "__unknown__", "job 7"}
    (hint,) = unnamed_hints([node_of(shown), node_of(SHARED)])
    assert hint.startswith("1 pod without a name")
    assert [*unnamed_hints([node_of(SHARED)])] == []


@for_each("age_seconds,is_old", [(-5, False), (2, False), (11, False), (12, True)])
def test_a_node_whose_newest_sample_is_old_is_reported(age_seconds: int, *, is_old: bool) -> None:
    lines = [*old_hints([node_of(event())], now_ns=START_NS + age_seconds * SECOND_NS)]
    assert lines == (
        [f"node-a: the newest sample is {age_seconds} s old; check its agent, and the join"]
        if is_old
        else []
    )


def test_a_gpu_that_does_not_respond_has_shares_without_memory() -> None:
    silent = reading(unresponsive=True, memory_total_bytes=None, memory_used_bytes=None)
    idle = entry(IDLE, allocation=0, allocated_ns=SECOND_NS, memory_bytes=None, busy_ns=None)
    node = node_of(event(gpus=[books(silent, idle)], allocated_to=[holder()]))

    (user,) = node.devices[0].users.values()
    assert (user.allocated_ns, user.allocated_bytes) == (SECOND_NS, 0)
    assert list(detail_lines([node]))[-3].endswith("(-)")


@for_each(
    "nodes,cluster,selected",
    [
        ([], None, ["node-a", "eu/node-a"]),
        (["node-a"], None, ["node-a", "eu/node-a"]),
        (["eu/node-a"], None, ["eu/node-a"]),
        (["default/node-a"], None, ["node-a"]),
        (["node-a"], "eu", ["eu/node-a"]),
        (["node-b"], None, []),
    ],
)
def test_a_node_is_selected_by_its_name_or_with_its_cluster(
    nodes: list[str], cluster: str | None, selected: list[str]
) -> None:
    both = [node_of(event()), node_of(event(cluster="eu"))]

    assert [
        node.name for node in both if is_selected(node, nodes=nodes, cluster=cluster)
    ] == selected


@for_each(
    "nodes,cluster,absent",
    [
        ([], None, []),
        (["node-a", "default/node-a"], None, []),
        (["node-a", "nosuch"], None, ["nosuch"]),
        (["node-a", "eu/node-a"], None, ["eu/node-a"]),
        (["node-a"], "eu", ["node-a in cluster eu"]),
        ([], "eu", ["cluster eu"]),
    ],
)
def test_each_name_without_a_node_is_reported_and_only_without_any_node_the_agents(
    nodes: list[str], cluster: str | None, absent: list[str]
) -> None:
    lines = explain_absent([node_of(event())], nodes=nodes, cluster=cluster)
    assert [line.partition(";")[0] for line in lines] == [
        f"{name}: no event in the last 30 s" for name in absent
    ]
    (line,) = explain_absent([], nodes=nodes, cluster=cluster)
    assert "check the agents and the join" in line


async def test_the_newest_event_of_each_node_counts_even_among_unreadable_records() -> None:
    on = bus()
    await publish(on, event(0), event(2), b"{", event(1), event(0, node="node-b"))

    found = await read_newest(on, since_ms=0)
    assert [(one.node, one.time_ns) for one in found] == [
        ("node-a", START_NS + 2 * SECOND_NS),
        ("node-b", START_NS),
    ]
    assert await read_newest(on, since_ms=START_NS // 10**6 + 10_000) == []
