"""Errors, wear and limits, and what an operator is told of a board."""

from typing import Any, Final
from uuid import NAMESPACE_OID, uuid5

import pynvml

from simulator.device import SimulatedGpu
from simulator.identities import pci_bus_id
from simulator.nvml.session import Handle, Session

# ruff: noqa: N802, N803  # NVML's own names


_BANKS: Final = 640
_REMAPPED_BANKS_PER_ROW: Final = 1
_MAX_SRAM_ERRORS: Final = 3
_SLOWDOWN_CELSIUS: Final = {
    pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92,
    pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89,
}
_MIN_LIMIT_RATIO: Final = 2 / 7
_LANES: Final = 16
_BAR1_USED_BYTES: Final = 6 << 20


class Health(Session):
    """The functions that tell of errors and limits."""

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, errorType: int, counterType: int) -> int:
        """Return the memory's errors, all of them or those since the driver was loaded."""
        gpu = self._gpu(handle)
        if counterType not in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        corrected = errorType == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        name = "ecc_corrected" if corrected else "ecc_uncorrected"
        if counterType == pynvml.NVML_AGGREGATE_ECC:
            return self._count(gpu, name)
        loaded_ns, ailments = self._driver_loaded_ns, gpu.facts.ailments
        return ailments.count(name, self._since_epoch_ns(), since_ns=loaded_ns)

    def nvmlDeviceGetSramEccErrorStatus(self, device: Handle, status: Any) -> int:  # noqa: ANN401  # a reference to a struct
        """Fill in the errors of the chip's own memory."""
        gpu = self._newer(device)
        struct = status._obj  # noqa: SLF001  # what ctypes.byref refers to
        struct.aggregateCor = struct.volatileCor = self._count(gpu, "sram_corrected")
        struct.aggregateUncSecDed = self._count(gpu, "sram_uncorrected")
        struct.volatileUncSecDed = struct.aggregateUncSecDed
        struct.bThresholdExceeded = int(struct.aggregateUncSecDed > _MAX_SRAM_ERRORS)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetRemappedRows(self, device: Handle) -> tuple[int, int, int, int]:
        """Return the rows replaced for corrected and uncorrected errors, pending, failed."""
        gpu = self._newer(device)
        now_ns, ailments = self._since_epoch_ns(), gpu.facts.ailments
        pending = ailments.has("remap_pending", now_ns)
        failed = ailments.has("remap_failed", now_ns)
        return 0, self._count(gpu, "rows_remapped"), int(pending), int(failed)

    def nvmlDeviceGetRowRemapperHistogram(self, device: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the memory's banks by the spare rows that they have left."""
        banks = pynvml.c_nvmlRowRemapperHistogramValues()
        used = self._count(self._newer(device), "rows_remapped") * _REMAPPED_BANKS_PER_ROW
        banks.high = min(_BANKS, used)
        banks.max = _BANKS - banks.high
        return banks

    def nvmlDeviceGetPcieReplayCounter(self, handle: Handle) -> int:
        """Return the PCIe packets sent again."""
        return self._count(self._gpu(handle), "pcie_replays")

    def nvmlDeviceGetGpuFabricInfoV(self, device: Handle, gpuFabricInfo: Any) -> int:  # noqa: ANN401  # a reference to a struct
        """Fill in the state of the fabric: joined where the GPU has links and is a Hopper."""
        gpu = self._gpu(device)
        if not gpu.facts.architecture.has_profiling:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        struct = gpuFabricInfo._obj  # noqa: SLF001  # what ctypes.byref refers to
        struct.state = (
            pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
            if gpu.facts.model.nvlinks
            else pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
        )
        struct.healthMask = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Handle) -> int:
        """Return the PCIe link's generation."""
        return self._gpu(handle).facts.model.pcie_generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Handle) -> int:
        """Return the PCIe link's lanes."""
        self._gpu(handle)
        return _LANES

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the window through which others reach the memory."""
        gpu = self._gpu(handle)
        memory = pynvml.c_nvmlBAR1Memory_t()
        memory.bar1Total = 1 << (gpu.facts.memory_bytes - 1).bit_length()
        memory.bar1Used = _BAR1_USED_BYTES
        memory.bar1Free = memory.bar1Total - memory.bar1Used
        return memory

    def nvmlDeviceGetFanSpeed(self, handle: Handle) -> int:
        """Refuse: the boards of data centres have no fans."""
        self._gpu(handle)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetGridLicensableFeatures_v4(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return what can be licensed: nothing, where nothing is virtual."""
        self._gpu(handle)
        return pynvml.c_nvmlGridLicensableFeatures_v4_t()

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        """Return the limit in force, in milliwatts."""
        return round(self._gpu(handle).facts.max_watts * 1000)

    def nvmlDeviceGetPowerManagementLimit(self, handle: Handle) -> int:
        """Return the limit that the owner has set."""
        return self.nvmlDeviceGetEnforcedPowerLimit(handle)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle) -> int:
        """Return the limit without a setting."""
        return self.nvmlDeviceGetEnforcedPowerLimit(handle)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Handle) -> list[int]:
        """Return the lowest and the highest limit that can be set."""
        most = self.nvmlDeviceGetEnforcedPowerLimit(handle)
        return [round(most * _MIN_LIMIT_RATIO), most]

    def nvmlDeviceGetTemperatureThreshold(self, handle: Handle, threshold: int) -> int:
        """Return a temperature limit; newer GPUs tell margins instead."""
        if not self._gpu(handle).facts.architecture.has_thresholds:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if threshold not in _SLOWDOWN_CELSIUS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _SLOWDOWN_CELSIUS[threshold]

    def _newer(self, handle: Handle) -> SimulatedGpu:
        gpu = self._gpu(handle)
        if not gpu.facts.architecture.remaps_rows:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu

    def _count(self, gpu: SimulatedGpu, name: str) -> int:
        return gpu.facts.ailments.count(name, self._since_epoch_ns())


# What is built into a board or set on it.

# ruff: noqa: N802, N803  # NVML's own names


_SERIAL_DIGITS: Final = 13
_INFOROM: Final = {
    pynvml.NVML_INFOROM_OEM: "2.1",
    pynvml.NVML_INFOROM_ECC: "7.16",
}


class Board(Session):
    """The functions that describe a board."""

    def nvmlSystemGetNVMLVersion(self) -> str:
        """Return the library's version."""
        self._check_open()
        return "13.580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        """Return the newest CUDA that the driver can run."""
        self._check_open()
        return 13_000

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        """Return the number in the device file."""
        return self._gpu(handle).facts.index

    def nvmlDeviceGetSerial(self, handle: Handle) -> str:
        """Return the board's serial number."""
        drawn = uuid5(NAMESPACE_OID, self._gpu(handle).facts.uuid).int
        return str(drawn)[:_SERIAL_DIGITS]

    def nvmlDeviceGetPciInfo_v3(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return where the board is plugged in."""
        pci = pynvml.nvmlPciInfo_t()
        address = pci_bus_id(self._gpu(handle).facts.index)
        pci.bus = int(address.split(":")[1], 16)
        pci.busId = address.encode()
        return pci

    def nvmlDeviceGetBrand(self, handle: Handle) -> int:
        """Return the product line."""
        tesla = self._gpu(handle).facts.name.startswith("Tesla")
        return int(pynvml.NVML_BRAND_TESLA if tesla else pynvml.NVML_BRAND_NVIDIA)

    def nvmlDeviceGetArchitecture(self, device: Handle) -> int:
        """Return the generation."""
        return self._gpu(device).facts.architecture.number

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        """Return CUDA's version of the chip."""
        return self._gpu(handle).facts.architecture.compute_capability

    def nvmlDeviceGetVbiosVersion(self, handle: Handle) -> str:
        """Return the board's firmware."""
        self._gpu(handle)
        return "96.00.A5.00.01"

    def nvmlDeviceGetInforomImageVersion(self, handle: Handle) -> str:
        """Return the version of the board's store of facts."""
        self._gpu(handle)
        return "G520.0200.00.05"

    def nvmlDeviceGetInforomVersion(self, handle: Handle, infoRomObject: int) -> str:
        """Return the version of an object in it."""
        self._gpu(handle)
        if infoRomObject not in _INFOROM:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _INFOROM[infoRomObject]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Handle) -> int:
        """Return the PCIe generation that card and slot can do."""
        return self._gpu(handle).facts.model.pcie_generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Handle) -> int:
        """Return the PCIe lanes that card and slot can do."""
        self._gpu(handle)
        return _LANES

    def nvmlDeviceGetEccMode(self, handle: Handle) -> list[int]:
        """Return whether errors are corrected, now and after the next start."""
        self._gpu(handle)
        return [pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_FEATURE_ENABLED]

    def nvmlDeviceGetPersistenceMode(self, handle: Handle) -> int:
        """Return whether the driver keeps the GPU up without users."""
        self._gpu(handle)
        return int(pynvml.NVML_FEATURE_ENABLED)

    def nvmlDeviceGetComputeMode(self, handle: Handle) -> int:
        """Return who may compute."""
        self._gpu(handle)
        return int(pynvml.NVML_COMPUTEMODE_DEFAULT)

    def nvmlDeviceGetP2PStatus(self, device1: Handle, device2: Handle, p2pIndex: int) -> int:
        """Return whether one GPU reaches another: by NVLink where both have links."""
        if p2pIndex != pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        linked = all(self._gpu(one).facts.model.nvlinks for one in (device1, device2))
        status = pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return int(status)
