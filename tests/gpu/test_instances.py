"""MIG and accounting on this machine's GPUs as they are configured; the tests change no setting.

`-s` prints what the driver returns, which only real hardware can show.
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
        pytest.skip(f"no usable GPU: {error}")
    finally:
        nvml.close()


def booked(gpu: NvidiaGpu) -> RawGpuSample:
    return RawGpuSample(
        uuid=gpu.uuid, index=gpu.index, **gpu.query(CallGroup.USAGE, SampleCursor())
    )


def test_a_gpu_reports_whether_mig_is_enabled_and_its_instances(gpus: list[NvidiaGpu]) -> None:
    for gpu in gpus:
        answer = booked(gpu)
        print(gpu.uuid, answer.mig_enabled, [one.instance for one in answer.instances])  # noqa: T201  # the output is the purpose
        assert answer.mig_enabled or not answer.instances
        for one in answer.instances:
            assert one.uuid.startswith("MIG-")
            assert one.instance
            assert one.instance.profile
            assert one.instance.gpu_instance is not None


def test_instances_together_have_at_most_the_memory_of_their_gpu(gpus: list[NvidiaGpu]) -> None:
    for gpu in gpus:
        answer = booked(gpu)
        parts = {
            one.instance.gpu_instance: one.memory_total_bytes or 0
            for one in answer.instances
            if one.instance
        }
        assert sum(parts.values()) <= (answer.memory_total_bytes or 0)


def test_process_accounts_are_read_if_and_only_if_accounting_mode_is_on(
    gpus: list[NvidiaGpu],
) -> None:
    for gpu in gpus:
        answer = booked(gpu)
        if answer.mig_enabled:
            continue
        try:
            is_on = pynvml.nvmlDeviceGetAccountingMode(gpu.handle) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            is_on = False
        assert (answer.process_stats is not None) == is_on


def test_the_driver_answers_whether_it_supports_the_sums_of_accounts(gpus: list[NvidiaGpu]) -> None:
    """Any code except "function not found" means that the driver has the call."""
    for gpu in gpus:
        message = "it answers"
        try:
            pynvml.nvmlDeviceGetAccountingStats_v2(gpu.handle, 1)
        except pynvml.NVMLError as error:
            message = str(error)
        print(gpu.uuid, "nvmlDeviceGetAccountingStats_v2:", message)  # noqa: T201  # the output is the purpose
        assert message
