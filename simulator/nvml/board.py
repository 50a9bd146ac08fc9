"""What is built into a board or set on it."""
# ruff: noqa: N802, N803  # NVML's own names

from typing import Any, Final
from uuid import NAMESPACE_OID, uuid5

import pynvml

from simulator.identities import pci_bus_id
from simulator.nvml.session import Handle, Session

_SERIAL_DIGITS: Final = 13
_INFOROM: Final = {
    pynvml.NVML_INFOROM_OEM: "2.1",
    pynvml.NVML_INFOROM_ECC: "7.16",
}
_LANES: Final = 16


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
