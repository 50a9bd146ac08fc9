"""How busy a GPU and its processes are, in whole percents of the driver's windows."""
# ruff: noqa: N802, N803  # NVML's own names

from typing import Any

import pynvml

from simulator.nvml.session import Handle, Session


class Utilization(Session):
    """The functions that tell of the driver's sampling windows."""

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return whole percents of the newest completed window."""
        windows = self._windows_of(handle)
        window = windows.latest(self._since_epoch_ns())
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = windows.gpu_percent(window)
        rates.memory = windows.memory_percent(window)
        return rates

    def nvmlDeviceGetSamples(
        self, device: Handle, sampling_type: int, timeStamp: int
    ) -> tuple[int, list[Any]]:
        """Return the ring buffer's samples newer than `timeStamp`; NotFound when there are none."""
        windows = self._windows_of(device)
        values = {
            pynvml.NVML_TOTAL_POWER_SAMPLES: windows.milliwatts,
            pynvml.NVML_GPU_UTILIZATION_SAMPLES: windows.gpu_percent,
            pynvml.NVML_MEMORY_UTILIZATION_SAMPLES: windows.memory_percent,
        }
        if sampling_type not in values:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        value = values[sampling_type]
        newer = windows.newer_than(timeStamp, now_ns=self._since_epoch_ns())
        if not newer:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        samples = [_sample(window.timestamp_us, value(window)) for window in newer]
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Return each buffered sample newer than `timeStamp`; NotFound when there are none."""
        windows = self._windows_of(handle)
        found = []
        for window in windows.newer_than(timeStamp, now_ns=self._since_epoch_ns()):
            for sample in windows.process_samples(window):
                struct = pynvml.c_nvmlProcessUtilizationSample_t()
                struct.pid = sample.pid
                struct.timeStamp = sample.timestamp_us
                struct.smUtil = sample.sm_percent
                struct.memUtil = sample.memory_percent
                found.append(struct)
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found


def _sample(timestamp_us: int, value: int) -> Any:  # noqa: ANN401  # a ctypes struct
    sample = pynvml.c_nvmlSample_t()
    sample.timeStamp = timestamp_us
    sample.sampleValue.uiVal = value
    return sample
