"""The check of stated shares, and the queries of the kubelet's list of pods that it depends on."""

from collections.abc import Iterable
from typing import Literal

import pytest

from gpuledger.records import GpuFacts
from gpuledger.runtime import Check
from gpuledger_agent.host.kubelet.assignments import DeviceAssignment, DeviceIndex
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.merge import Merged, merge_allocations
from gpuledger_agent.host.kubelet.shares.pod_shares import PodShares
from gpuledger_agent.settings import AllocationsSettings
from tests.errors import has_words
from tests.unit.agent.host.kubelet.shares.pods import pod

GPUS = DeviceIndex.of(
    GpuFacts(uuid=uuid, index=0, memory_total_bytes=2**30, instances=[], capabilities=[])
    for uuid in ("GPU-a", "GPU-b")
)
Sources = Literal["auto"] | tuple[Literal["hami", "volcano", "gpushare", "koordinator", "kai"], ...]


def device(device_id: str, *, namespace: str = "serving") -> DeviceAssignment:
    return DeviceAssignment(
        namespace=namespace,
        pod="chat-0",
        container="main",
        resource_name="nvidia.com/gpu",
        device_id=device_id,
    )


COUNTED = device("GPU-a-0")
NAMED = device("GPU-a")
RESERVED = device("GPU-a", namespace="runai-reservation")
GOOD = pod({"hami.io/vgpu-devices-allocated": "GPU-b,NVIDIA,1,25:;"})
BAD = pod({"hami.io/vgpu-devices-allocated": "x,NVIDIA:;"})


class Bench:
    """Shares with their check, as the agent has them with or without access to the list."""

    def __init__(self, sources: Sources = "auto", *, has_list: bool = True) -> None:
        self.check, self.queries = Check(), Check()
        self.shares = PodShares(
            AllocationsSettings(sources=sources),
            check=self.check,
            pod_list_check=self.queries if has_list else None,
        )

    def report(self, *devices: DeviceAssignment, pods: list[ListedPod] | None = None) -> str:
        """Report the devices, and the pods if the kubelet lists them; return the detail."""
        if pods is not None:
            self.shares.take_pods(pods)
        self.shares.report(self.merge(devices))
        return self.check.detail

    def are_unknown(self, *devices: DeviceAssignment) -> bool:
        """Return whether it is unknown to whom the rest of these devices is allocated."""
        return self.shares.are_unknown(self.merge(devices))

    def merge(self, devices: Iterable[DeviceAssignment]) -> Merged:
        """Return the allocations of these devices."""
        return merge_allocations(
            devices,
            self.shares.stated,
            GPUS,
            placeholder_namespaces=self.shares.placeholder_namespaces,
        )


def test_the_check_passes_on_a_node_that_needs_no_annotations_and_may_not_read_them() -> None:
    bench = Bench(has_list=False)
    bench.report(NAMED)
    assert bench.check.is_ok


def test_by_default_a_refused_list_matters_only_on_a_node_that_needs_it() -> None:
    bench = Bench()
    bench.queries.failed("HTTP 403: grant nodes/pods")
    bench.report(NAMED)
    assert bench.check.is_ok
    assert "grant nodes/pods" in bench.report(COUNTED)
    assert not bench.check.is_ok


def test_a_refused_list_matters_if_sources_are_configured() -> None:
    bench = Bench(("hami",))
    bench.queries.failed("HTTP 403: grant nodes/pods")
    assert "grant nodes/pods" in bench.report(NAMED)
    assert not bench.check.is_ok


def test_a_list_that_fails_later_matters_because_its_shares_are_in_use() -> None:
    bench = Bench()
    bench.report(COUNTED, pods=[GOOD])
    assert bench.check.is_ok
    bench.queries.failed("no answer within 5 s")
    assert "no answer" in bench.report(COUNTED)
    assert not bench.check.is_ok


@pytest.mark.parametrize(
    ("assigned", "words"),
    [
        (COUNTED, ["serving/chat-0", "do not name", "agent.readKubelet"]),
        (RESERVED, ["reserve 1 GPUs", "agent.readKubelet"]),
    ],
)
def test_a_node_that_needs_annotations_without_the_right_to_read_them_names_the_remedy(
    assigned: DeviceAssignment, words: list[str]
) -> None:
    bench = Bench(has_list=False)
    assert has_words(*words)(ValueError(bench.report(assigned)))
    assert not bench.check.is_ok


def test_the_check_names_a_pod_whose_device_ids_count_shares_without_an_annotation() -> None:
    bench = Bench()
    assert "serving/chat-0" in bench.report(COUNTED, pods=[pod()])
    assert not bench.check.is_ok
    bench.report(COUNTED, pods=[GOOD])
    assert bench.check.is_ok


def test_the_check_names_bad_annotations_and_counts_those_that_it_does_not_name() -> None:
    bench = Bench()
    bad = [pod(BAD.metadata.annotations, name=f"bad-{number}") for number in range(5)]
    detail = bench.report(pods=bad)
    assert has_words("serving/bad-0", "serving/bad-2", "2 more")(ValueError(detail))
    assert not bench.check.is_ok


def test_annotations_of_products_that_are_not_configured_are_not_read() -> None:
    bench = Bench(("kai",))
    assert "allocations.sources" in bench.report(COUNTED, pods=[GOOD, BAD])
    assert bench.shares.stated
    assert not bench.shares.stated.shares
    assert not bench.shares.stated.problems


def test_ids_of_memory_need_no_annotation_on_a_node_with_one_gpu() -> None:
    merged = merge_allocations(
        [device("GPU-a-_-0")],
        None,
        DeviceIndex.of([GpuFacts(uuid="GPU-a", index=0, instances=[], capabilities=[])]),
    )
    assert not merged.unnamed
    assert len(merged.allocations) == 1


def test_the_check_does_not_fail_between_a_new_pod_and_the_list_that_has_it() -> None:
    bench = Bench()
    bench.report(COUNTED)
    assert not bench.check.has_failed
    bench.report(COUNTED, pods=[GOOD])
    assert bench.check.is_ok
    bench.shares.request_soon()
    bench.report(COUNTED, device("GPU-a-1"))
    assert bench.check.is_ok
    bench.shares.begin_query()
    bench.report(COUNTED, pods=[])
    assert bench.check.has_failed


def test_a_node_without_sources_does_not_need_annotations() -> None:
    bench = Bench((), has_list=False)
    bench.report(COUNTED, RESERVED)
    assert bench.check.is_ok


def test_changed_pods_cause_one_query() -> None:
    shares = Bench().shares
    assert not shares.wants_pods()
    shares.request_soon()
    assert shares.wants_pods()
    shares.begin_query()
    assert not shares.wants_pods()


def test_an_equal_list_does_not_resolve_the_shares_again() -> None:
    shares = Bench().shares
    shares.take_pods([GOOD])
    stated = shares.stated
    shares.take_pods([pod(GOOD.metadata.annotations)])
    assert shares.stated is stated


@pytest.mark.parametrize("has_list", [False, True], ids=["without access", "with access"])
@pytest.mark.parametrize(
    ("assigned", "are_needed"),
    [([COUNTED], True), ([RESERVED], True), ([NAMED], False), ([], False)],
    ids=["counted ids", "a reserved GPU", "a named GPU", "no GPU"],
)
def test_allocations_are_unknown_until_annotations_that_the_node_needs_are_read(
    assigned: list[DeviceAssignment], *, are_needed: bool, has_list: bool
) -> None:
    bench = Bench(has_list=has_list)
    assert bench.are_unknown(*assigned) == are_needed
    bench.queries.failed("HTTP 403: grant nodes/pods")
    assert bench.are_unknown(*assigned) == are_needed
    bench.shares.take_pods([])
    bench.queries.ok("the kubelet lists the node's pods")
    assert not bench.are_unknown(*assigned)


@pytest.mark.parametrize(
    ("assigned", "are_needed"),
    [([COUNTED], True), ([RESERVED], True), ([NAMED], False), ([], False)],
    ids=["counted ids", "a reserved GPU", "a named GPU", "no GPU"],
)
def test_allocations_are_unknown_while_the_annotations_that_the_node_needs_may_be_outdated(
    assigned: list[DeviceAssignment], *, are_needed: bool
) -> None:
    bench = Bench()
    bench.shares.take_pods([])
    bench.queries.failed("HTTP 403: grant nodes/pods")
    assert bench.are_unknown(*assigned) == are_needed, "as after a restart"
    bench.queries.ok("the kubelet lists the node's pods")
    assert not bench.are_unknown(*assigned)
    bench.shares.request_soon()
    assert bench.are_unknown(*assigned) == are_needed, "a pod is new"
    bench.shares.begin_query()
    bench.shares.request_soon()
    bench.shares.take_pods([])
    assert bench.are_unknown(*assigned) == are_needed, "another pod is newer than the query"
    bench.shares.begin_query()
    bench.shares.take_pods([])
    assert not bench.are_unknown(*assigned)


def test_allocations_are_known_on_a_node_on_which_no_product_is_configured() -> None:
    assert not Bench(()).are_unknown(COUNTED, RESERVED)
