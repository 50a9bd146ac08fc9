"""The chip's own counters between two samples, limited to values that the driver marks valid."""

import math

import pynvml
import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.core.readings import RATIO
from gpuledger_agent.gpu.nvidia.catalogue import GpmMetric, MetricSpec
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.gpm import Gpm
from tests.fakes.nvml_pointers import GpmFunctions, play

METRICS = "nvmlGpmMetricsGet"


def reading(name: str, number: int, count: int | None = None) -> MetricSpec:
    return MetricSpec(name=name, unit=RATIO, sources=(GpmMetric(number, count),))


BY_LINK = GpmMetric(62, 3, step=2, is_by_link=True)
READINGS = [
    reading("busy", 1),
    reading("occupied", 3),
    reading("decoders", 30, count=3),
    MetricSpec(name="received", unit=RATIO, sources=(BY_LINK,)),
]


class Bench:
    """Counters over a library of functions, and a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu_instance: int | None = None) -> None:
        self.chip = GpmFunctions()
        self.chip.values = {1: 50.0, 3: 25.0}
        self.now_ns = 0
        self.client: DeviceClient = play(monkeypatch, self.chip.functions())
        self.gpm = Gpm(
            self.client,
            READINGS,
            group=CallGroup.PROFILING,
            monotonic_ns=lambda: self.now_ns,
            gpu_instance=gpu_instance,
        )

    def query(self, after_seconds: float = 1.0) -> dict[str, object]:
        self.now_ns += round(after_seconds * NS_PER_SECOND)
        return self.gpm.query()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_first_sample_reports_nothing_and_each_later_one_the_time_since_the_previous(
    bench: Bench,
) -> None:
    assert bench.query() == {}
    busy = {"profiling": {"busy": 50.0, "occupied": 25.0}}
    assert bench.query(1.0) == {**busy, "profiling_ns": NS_PER_SECOND}
    assert bench.query(0.25) == {**busy, "profiling_ns": NS_PER_SECOND // 4}


def test_two_buffers_and_one_struct_are_reused(bench: Bench) -> None:
    for _ in range(5):
        bench.query()
    assert bench.chip.pairs == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert len(bench.chip.holds) == 2
    assert len(bench.chip.structs) == 1


def test_samples_less_than_a_tenth_of_a_second_apart_are_not_compared(bench: Bench) -> None:
    bench.query()
    assert bench.query(0.099) == {}
    assert bench.chip.samples == 1
    assert bench.query(0.001)["profiling_ns"] == NS_PER_SECOND // 10


def test_after_a_long_gap_the_counters_start_over(bench: Bench) -> None:
    bench.query()
    assert bench.query(601) == {}
    assert bench.query()["profiling_ns"] == NS_PER_SECOND
    assert bench.chip.pairs == [(2, 3)]


def test_a_metric_counts_only_if_its_own_code_is_success(bench: Bench) -> None:
    bench.chip.values = {1: 50.0}
    bench.chip.codes = {3: pynvml.NVML_ERROR_NOT_SUPPORTED}
    bench.query()
    assert bench.query()["profiling"] == {"busy": 50.0}
    assert bench.client.outcomes[METRICS, 3] == "NotSupported"
    assert bench.client.outcomes[METRICS, 1] is None


def test_a_metric_counts_only_if_the_whole_call_succeeds(bench: Bench) -> None:
    bench.query()
    bench.query()
    bench.chip.error = pynvml.NVML_ERROR_TIMEOUT
    assert bench.query() == {}
    bench.chip.error = 0
    assert bench.query()["profiling_ns"] == NS_PER_SECOND


def test_a_device_that_refuses_all_metrics_is_no_longer_queried(bench: Bench) -> None:
    bench.chip.values = {}
    bench.query()
    assert bench.query()["profiling"] == {}
    requested = len(bench.chip.pairs)
    assert bench.query()["profiling"] == {}
    assert len(bench.chip.pairs) == requested


def test_nan_means_no_data_and_not_a_refusal(bench: Bench) -> None:
    bench.chip.values = {1: math.nan, 3: 25.0}
    bench.query()
    assert bench.query()["profiling"] == {"occupied": 25.0}
    bench.chip.values = {1: 0.0, 3: 25.0}
    assert bench.query()["profiling"] == {"busy": 0.0, "occupied": 25.0}


def test_a_list_has_a_value_per_engine_up_to_the_first_missing_one(bench: Bench) -> None:
    bench.chip.values = {1: 50.0, 30: 1.0, 31: 2.0}
    bench.query()
    assert bench.query()["profiling"] == {"busy": 50.0, "decoders": [1.0, 2.0]}
    bench.chip.values = {1: 50.0, 31: 2.0}
    assert bench.query()["profiling"] == {"busy": 50.0}


def test_a_metric_per_link_has_the_existing_links(bench: Bench) -> None:
    bench.chip.values = {62: 1.0, 63: 9.0, 66: 0.0}
    bench.query()
    assert bench.query()["profiling"] == {"received": {0: 1.0, 2: 0.0}}


def test_if_an_unknown_metric_fails_the_whole_call_each_is_tried_once_on_its_own(
    bench: Bench,
) -> None:
    bench.chip.unknown = [30, 31, 32]
    bench.query()
    assert bench.query()["profiling"] == {"busy": 50.0, "occupied": 25.0}
    tried = len(bench.chip.pairs)
    assert bench.query()["profiling"] == {"busy": 50.0, "occupied": 25.0}
    assert len(bench.chip.pairs) == tried + 1


@pytest.mark.parametrize("functions", ["old library", "old chip"])
def test_without_counters_their_support_is_queried_once(
    monkeypatch: pytest.MonkeyPatch, functions: str
) -> None:
    bench = Bench(monkeypatch)
    bench.chip.supported = 0
    if functions == "old library":
        play(monkeypatch, {})
    assert [bench.query() for _ in range(3)] == [{}, {}, {}]
    assert bench.client.support_version == 1
    assert bench.chip.holds == {}


def test_a_failed_sample_leaves_its_tick_empty_and_the_next_one_covers_both(bench: Bench) -> None:
    bench.query()
    bench.chip.sample_error = pynvml.NVML_ERROR_TIMEOUT
    assert bench.query() == {}
    bench.chip.sample_error = 0
    assert bench.query()["profiling_ns"] == 2 * NS_PER_SECOND


def test_an_instance_is_sampled_through_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, gpu_instance=3)
    bench.query()
    assert bench.query()["profiling"] == {"busy": 50.0, "occupied": 25.0}
    assert bench.chip.instances == [3, 3]


def test_the_buffers_are_freed_at_the_end_and_recreated_after_it(bench: Bench) -> None:
    bench.query()
    bench.gpm.close()
    bench.gpm.close()
    assert sorted(bench.chip.freed) == sorted(bench.chip.holds)
    assert bench.query() == {}
    assert bench.query()["profiling_ns"] == NS_PER_SECOND


def test_a_refused_metric_is_queried_again_after_the_client_forgets(bench: Bench) -> None:
    bench.chip.values = {1: 50.0}
    bench.query()
    bench.query()
    bench.chip.values = {1: 50.0, 3: 25.0}
    assert bench.query()["profiling"] == {"busy": 50.0}
    bench.client.forget()
    assert bench.query()["profiling"] == {"busy": 50.0, "occupied": 25.0}


def test_buffers_that_a_hanging_call_may_still_write_to_are_not_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.query()

    def close_meanwhile(_device: object, _sample: object) -> int:
        bench.gpm.close()
        return 0

    play(monkeypatch, {**bench.chip.functions(), "nvmlGpmSampleGet": close_meanwhile})
    bench.query()
    assert bench.chip.freed == []


def test_without_the_metrics_call_the_buffers_are_freed_and_it_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    functions = bench.chip.functions()
    del functions["nvmlGpmMetricsGet"]
    play(monkeypatch, functions)
    assert [bench.query() for _ in range(4)] == [{}] * 4
    assert bench.client.outcomes[METRICS,] == "FunctionNotFound"
    assert len(bench.chip.freed) == 2
    assert bench.chip.samples == 2
