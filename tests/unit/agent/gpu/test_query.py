"""A group of the catalogue is read from a device with as few calls as possible."""
# ruff: noqa: ANN401  # the binding's structs have no types

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.core.readings import CELSIUS, COUNT, NUMBER
from gpuledger_agent.gpu.nvidia.catalogue import (
    CATALOGUE,
    FieldValue,
    FunctionCall,
    MetricSpec,
    Source,
)
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.query import QueryPlan
from gpuledger_agent.gpu.protocol import SourceLostError
from tests.fakes.nvml import Altered, answering
from tests.fakes.nvml_pointers import FieldsFunction, play, referent_of


def reading(name: str, *requested: Source) -> MetricSpec:
    return MetricSpec(name=name, unit=CELSIUS, sources=requested)


def inquiry(library: Altered, *readings: MetricSpec) -> QueryPlan:
    return QueryPlan(DeviceClient(library=library, handle="gpu"), readings)


def test_readings_of_one_call_are_taken_from_one_result() -> None:
    library = answering(nvmlRows=(1, 2, 3), nvmlMemory=SimpleNamespace(used=7))
    requested = inquiry(
        library,
        reading("first", FunctionCall("nvmlRows", (), 0)),
        reading("last", FunctionCall("nvmlRows", (), 2)),
        reading("used", FunctionCall("nvmlMemory", (5,), "used")),
    )
    assert requested.query() == {"first": 1, "last": 3, "used": 7}
    assert library.requests == [("nvmlRows",), ("nvmlMemory", 5)]


def test_the_second_source_is_tried_after_the_first_is_refused() -> None:
    refusal = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    library = answering(nvmlNew=refusal, nvmlOld=4)
    requested = inquiry(library, reading("one", FunctionCall("nvmlNew"), FunctionCall("nvmlOld")))
    assert [requested.query(), requested.query(), requested.query()] == [{}, {"one": 4}, {"one": 4}]
    assert library.requests == [("nvmlNew",), ("nvmlOld",), ("nvmlOld",)]


def test_a_reading_refused_by_all_sources_is_not_queried_again() -> None:
    refusal = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    library = answering(nvmlNew=refusal)
    requested = inquiry(
        library, reading("one", FunctionCall("nvmlNew"), FunctionCall("nvmlMissing"))
    )
    assert [requested.query() for _ in range(4)] == [{}] * 4
    assert library.requests == [("nvmlNew",)]


def test_calls_and_fields_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def temperature(_handle: Any, _sensor: Any, given: Any) -> int:
        referent_of(given).value = 55
        return 0

    fields = FieldsFunction({82: (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 61)})
    requested = QueryPlan(
        play(
            monkeypatch,
            {"nvmlDeviceGetFieldValues": fields, "nvmlDeviceGetTemperature": temperature},
        ),
        [
            reading("die", FunctionCall("nvmlDeviceGetTemperature", (0,))),
            reading("memory", FieldValue(82)),
            reading("other", FieldValue(186)),
        ],
    )
    assert [requested.query() for _ in range(2)] == [{"die": 55, "memory": 61}] * 2
    assert fields.requests == [[82, 186], [82]]


@pytest.mark.parametrize(
    ("value_type", "member", "written"),
    [
        (pynvml.NVML_VALUE_TYPE_SIGNED_INT, "siVal", -8),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 2**32 - 8),
        (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, "sllVal", -8),
    ],
)
def test_a_margin_beyond_the_limit_is_negative_whichever_type_the_driver_names(
    monkeypatch: pytest.MonkeyPatch, value_type: int, member: str, written: int
) -> None:
    fields = FieldsFunction({193: (value_type, member, written)})
    client = play(monkeypatch, {"nvmlDeviceGetFieldValues": fields})
    specs = [spec for spec in CATALOGUE[CallGroup.HEALTH] if "margin_shutdown" in spec.name]
    assert QueryPlan(client, specs).query() == {"limits.temperature_margin_shutdown_celsius": -8}


def test_a_struct_that_the_driver_fills_is_passed_by_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(_handle: Any, reference: Any) -> int:
        assert referent_of(reference).version == pynvml.nvmlEccSramErrorStatus_v1
        referent_of(reference).aggregateCor = 5
        referent_of(reference).bThresholdExceeded = 1
        return 0

    call = "nvmlDeviceGetSramEccErrorStatus", (), "aggregateCor", "c_nvmlEccSramErrorStatus_v1_t"
    client = play(monkeypatch, {"nvmlDeviceGetSramEccErrorStatus": fill})
    assert QueryPlan(client, [reading("corrected", FunctionCall(*call))]).query() == {
        "corrected": 5
    }


@pytest.mark.parametrize(
    ("supported", "states", "status"), [(1, [0, 1], 1), (1, [0, 0], 0), (0, [], None)]
)
def test_a_gpu_is_licensed_if_one_of_its_features_is(
    monkeypatch: pytest.MonkeyPatch, supported: int, states: list[int], status: int | None
) -> None:
    def features(_handle: Any, reference: Any) -> int:
        referent_of(reference).isGridLicenseSupported = supported
        referent_of(reference).licensableFeaturesCount = len(states)
        for place, state in enumerate(states):
            referent_of(reference).gridLicensableFeatures[place].featureState = state
        return 0

    name = "nvmlDeviceGetGridLicensableFeatures_v4"
    row = MetricSpec(name="license", unit=COUNT, sources=(FunctionCall(name),))
    given = QueryPlan(play(monkeypatch, {name: features}), [row]).query()
    assert given["license"] == status


def test_a_lost_gpu_is_not_taken_for_a_missing_value() -> None:
    library = answering(nvmlNew=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(SourceLostError):
        inquiry(
            library, MetricSpec(name="one", unit=NUMBER, sources=(FunctionCall("nvmlNew"),))
        ).query()


def test_a_refused_reading_is_queried_again_after_the_client_forgets() -> None:
    library = answering(nvmlNew=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
    client = DeviceClient(library=library, handle="gpu")
    requested = QueryPlan(client, [reading("one", FunctionCall("nvmlNew"))])
    requested.query()
    library.answer("nvmlNew", 5)
    assert requested.query() == {}
    client.forget()
    requested.query()
    assert requested.query() == {"one": 5}
