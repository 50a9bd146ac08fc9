"""MIG and accounting on this machine's own GPUs, as they are set; nothing is switched on or off.

What the driver gives here is printed with `-s`: it answers what only hardware can.
"""

from collections.abc import Iterator

import pynvml
import pytest

from gpuledger_agent.core.raw import CallGroup, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError


@pytest.fixture(scope="module")
def gpus() -> Iterator[list[NvidiaGpu]]:
    nvml = NvmlSession(pynvml)
    try:
        yield list(nvml.open())
    except SourceLostError as error:
        pytest.skip(f"no GPU to look at: {error}")
    finally:
        nvml.close()


def booked(gpu: NvidiaGpu) -> RawGpuSample:
    return RawGpuSample(
        uuid=gpu.uuid, index=gpu.index, **gpu.query(CallGroup.BOOKS, SampleCursor())
    )


def test_a_gpu_says_whether_it_is_cut_and_into_what(gpus: list[NvidiaGpu]) -> None:
    for gpu in gpus:
        answer = booked(gpu)
        print(gpu.uuid, answer.mig_enabled, [one.instance for one in answer.instances])  # noqa: T201  # asked for
        assert answer.mig_enabled or not answer.instances
        for one in answer.instances:
            assert one.uuid.startswith("MIG-")
            assert one.instance
            assert one.instance.profile
            assert one.instance.gpu_instance is not None


def test_instances_have_no_more_memory_than_their_gpu(gpus: list[NvidiaGpu]) -> None:
    for gpu in gpus:
        answer = booked(gpu)
        parts = {
            one.instance.gpu_instance: one.memory_total_bytes or 0
            for one in answer.instances
            if one.instance
        }
        assert sum(parts.values()) <= (answer.memory_total_bytes or 0)


def test_accounts_are_there_exactly_where_the_mode_is_on(gpus: list[NvidiaGpu]) -> None:
    for gpu in gpus:
        answer = booked(gpu)
        if answer.mig_enabled:
            continue
        try:
            is_on = pynvml.nvmlDeviceGetAccountingMode(gpu.handle) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            is_on = False
        assert (answer.process_stats is not None) == is_on


def test_whether_the_driver_has_the_sums_of_accounts_is_told(gpus: list[NvidiaGpu]) -> None:
    """Any code but "no such function" says that the call is there."""
    for gpu in gpus:
        message = "it answers"
        try:
            pynvml.nvmlDeviceGetAccountingStats_v2(gpu.handle, 1)
        except pynvml.NVMLError as error:
            message = str(error)
        print(gpu.uuid, "nvmlDeviceGetAccountingStats_v2:", message)  # noqa: T201  # asked for
        assert message
