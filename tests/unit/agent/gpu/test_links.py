"""Only the NVLinks that a GPU has are queried, each by its number."""
# ruff: noqa: ANN401  # ctypes' structs have no types

from typing import Any

import pynvml
import pytest

from gpuledger_agent.core.readings import CELSIUS, KIBIBYTES
from gpuledger_agent.gpu.nvidia.catalogue import ALL_LINKS, EACH_LINK, FieldValue, MetricSpec
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.query import QueryPlan
from gpuledger_agent.gpu.protocol import GpuLostError
from tests.fakes.nvml_pointers import FieldsFunction, play

CALL = "nvmlDeviceGetFieldValues"
UINT = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
LONG = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
COUNT: int = pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT
SENT: int = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
READINGS = [
    MetricSpec(name="memory", unit=CELSIUS, sources=(FieldValue(82),)),
    MetricSpec(name="all", unit=KIBIBYTES, sources=(FieldValue(SENT, ALL_LINKS),)),
    MetricSpec(name="each", unit=KIBIBYTES, sources=(FieldValue(SENT, EACH_LINK),)),
]


def links(*given: int, known: int = 3) -> dict[int | tuple[int, int], Any]:
    """Return the fields of a GPU with 3 links; a negative number is a return code."""
    count = (UINT, "uiVal", known) if known >= 0 else -known
    each: dict[int | tuple[int, int], Any] = {
        (SENT, link): -value if value < 0 else (LONG, "ullVal", value)
        for link, value in enumerate(given)
    }
    return {82: (UINT, "uiVal", 61), COUNT: count, (SENT, ALL_LINKS): (LONG, "ullVal", 6), **each}


def inquiry(client: DeviceClient) -> QueryPlan:
    return QueryPlan(client, READINGS)


def test_links_are_counted_once_and_queried_in_one_call_with_everything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction(links(1, 2, 3))
    requested = inquiry(play(monkeypatch, {CALL: fields}))
    for _ in range(2):
        assert requested.query() == {"memory": 61, "all": 6, "each": {0: 1, 1: 2, 2: 3}}
    together = [82, SENT, SENT, SENT, SENT]
    assert fields.requests == [[COUNT], together, together]
    assert fields.scopes[1] == [0, ALL_LINKS, 0, 1, 2]


def test_a_refused_link_is_absent_and_never_queried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction(links(1, -pynvml.NVML_ERROR_NOT_SUPPORTED, 3))
    client = play(monkeypatch, {CALL: fields})
    requested = inquiry(client)
    assert [requested.query()["each"] for _ in range(2)] == [{0: 1, 2: 3}] * 2
    assert fields.scopes == [[0], [0, ALL_LINKS, 0, 1, 2], [0, ALL_LINKS, 0, 2]]
    assert client.outcomes[CALL, SENT, 1] == "NotSupported"
    assert client.outcomes[CALL, SENT, "each_link"] is None


def test_a_field_that_every_link_refuses_is_refused_once_and_never_queried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = -pynvml.NVML_ERROR_NOT_SUPPORTED
    fields = FieldsFunction(links(refused, refused, refused))
    client = play(monkeypatch, {CALL: fields})
    requested = inquiry(client)
    assert [requested.query() for _ in range(2)] == [{"memory": 61, "all": 6}] * 2
    assert fields.scopes[-1] == [0, ALL_LINKS]
    kept = {key: reason for key, reason in client.outcomes.items() if key[1:2] == (SENT,)}
    assert kept == {(CALL, SENT): None, (CALL, SENT, "each_link"): "NotSupported"}


def test_a_field_refused_for_all_links_together_may_work_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: dict[int | tuple[int, int], Any] = {(SENT, ALL_LINKS): pynvml.NVML_ERROR_NOT_SUPPORTED}
    requested = inquiry(play(monkeypatch, {CALL: FieldsFunction(links(1, 2, 3) | refused)}))
    expected = {"memory": 61, "each": {0: 1, 1: 2, 2: 3}}
    assert [requested.query() for _ in range(2)] == [expected] * 2


def test_a_link_that_fails_now_is_absent_now_and_queried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction(links(-pynvml.NVML_ERROR_TIMEOUT, 2, 3))
    requested = inquiry(play(monkeypatch, {CALL: fields}))
    assert requested.query()["each"] == {1: 2, 2: 3}
    fields.known |= links(9, 2, 3)
    assert requested.query()["each"] == {0: 9, 1: 2, 2: 3}


@pytest.mark.parametrize("known", [0, -pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_a_gpu_without_links_is_queried_once_for_their_number_and_for_no_link(
    monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    fields = FieldsFunction(links(1, 2, 3, known=known))
    requested = inquiry(play(monkeypatch, {CALL: fields}))
    assert ["each" in requested.query() for _ in range(3)] == [False] * 3
    assert fields.requests == [[COUNT], *[[82, SENT]] * 3]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_TIMEOUT])
def test_a_failed_query_for_the_number_of_links_loses_no_other_field(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fields = FieldsFunction(links(1, 2, 3))

    def refuse(handle: Any, count: Any, values: Any) -> int:
        return code if count.value == 1 else fields(handle, count, values)

    requested = inquiry(play(monkeypatch, {CALL: refuse}))
    assert [requested.query() for _ in range(2)] == [{"memory": 61, "all": 6}] * 2


@pytest.mark.parametrize("known", [-pynvml.NVML_ERROR_TIMEOUT, 2**32 - 1, 37])
def test_a_number_of_links_that_failed_or_is_implausible_is_queried_again(
    monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    fields = FieldsFunction(links(1, 2, 3, known=known))
    requested = inquiry(play(monkeypatch, {CALL: fields}))
    assert "each" not in requested.query()
    fields.known |= links(1, 2, 3)
    assert requested.query()["each"] == {0: 1, 1: 2, 2: 3}


def test_if_an_unknown_link_fails_the_whole_call_the_others_are_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction(links(1, 2), strict=True)
    requested = inquiry(play(monkeypatch, {CALL: fields}))
    for _ in range(2):
        assert requested.query() == {"memory": 61, "all": 6, "each": {0: 1, 1: 2}}
    assert fields.scopes[-1] == [0, ALL_LINKS, 0, 1]


def test_links_are_counted_again_after_the_client_forgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction(links(1, 2, 3, known=0))
    client = play(monkeypatch, {CALL: fields})
    requested = inquiry(client)
    requested.query()
    fields.known |= links(1, 2, 3)
    client.forget()
    assert requested.query()["each"] == {0: 1, 1: 2, 2: 3}


HISTORY: int = pynvml.NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_0
IN_A_ROW = [
    MetricSpec(name="history", unit=KIBIBYTES, sources=(FieldValue(HISTORY, EACH_LINK, 3),))
]


def test_consecutive_fields_make_a_list_per_link_up_to_the_first_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[int | tuple[int, int], Any] = {
        (HISTORY + position, link): (LONG, "ullVal", 10 * link + position)
        for link in range(3)
        for position in range(3)
    }
    given[HISTORY + 1, 1] = pynvml.NVML_ERROR_NOT_SUPPORTED
    fields = FieldsFunction(links() | given)
    requested = QueryPlan(play(monkeypatch, {CALL: fields}), IN_A_ROW)
    for _ in range(2):
        assert requested.query() == {"history": {0: [0, 1, 2], 1: [10], 2: [20, 21, 22]}}


def test_one_call_has_at_most_as_many_fields_as_are_known_to_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = range(1000, 1300)
    fields = FieldsFunction({number: (UINT, "uiVal", number) for number in numbers})
    specs = [
        MetricSpec(name=str(number), unit=CELSIUS, sources=(FieldValue(number),))
        for number in numbers
    ]
    requested = QueryPlan(play(monkeypatch, {CALL: fields}), specs)
    assert requested.query() == {str(number): number for number in numbers}
    assert [len(numbers) for numbers in fields.requests] == [128, 128, 44]


def test_a_lost_gpu_is_not_an_absent_link(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = FieldsFunction(links(1, -pynvml.NVML_ERROR_GPU_IS_LOST, 3))
    with pytest.raises(GpuLostError, match="nvmlDeviceGetFieldValues:138:1"):
        inquiry(play(monkeypatch, {CALL: fields})).query()
