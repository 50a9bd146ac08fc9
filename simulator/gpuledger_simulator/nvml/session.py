"""An open library: its users, handles and clock, and the constant properties of its GPUs.

The other modules report the state of devices; each contains at least one subclass of `Subject`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import NAMESPACE_OID, uuid5

import pynvml

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.drivers import DriverModel
from gpuledger_simulator.identities import pci_bus_id
from gpuledger_simulator.plan import PlannedIncident
from gpuledger_simulator.sampling_windows import SamplingWindows
from gpuledger_simulator.schema import EventSupport

# ruff: noqa: N802, N803  # NVML's own names


@dataclass(frozen=True)
class Handle:
    """A device handle, valid until the library is shut down."""

    index: int
    session: int


@dataclass(frozen=True)
class MigHandle(Handle):
    """The handle of an instance, valid until the MIG layout changes."""

    uuid: str


class Session:
    """The state that all functions of the library share.

    A call that fails in NVML fails here with the same error.
    """

    def __init__(
        self, gpus: Sequence[SimulatedGpu], *, clock: Clock, epoch_ns: int, uptime_ns: int,
        sample_period_ns: int, incidents: Sequence[PlannedIncident] = (),
        event_support: EventSupport = EventSupport(),  # noqa: B008  # frozen, so sharing it is safe
        shown_ns: Callable[[int], int] = lambda time_ns: time_ns,
        driver: DriverModel = DriverModel(),  # noqa: B008  # as above
    ) -> None:  # fmt: skip
        self.gpus = gpus
        self.clock = clock
        self.epoch_ns = epoch_ns
        self.driver_loaded_ns = -uptime_ns
        self.shown_ns = shown_ns
        self.driver = driver
        stamp_us = self.stamp_us if driver.stamps == "wall" else self._stamp_since_boot_us
        self._windows, self._process_windows = (
            [
                SamplingWindows(
                    gpu,
                    period_ns=sample_period_ns
                    if model.window_seconds is None
                    else round(model.window_seconds * NS_PER_SECOND),
                    stamp_us=stamp_us,
                    driver=model,
                )
                for gpu in gpus
            ]
            for model in (driver, driver.of_processes())
        )
        self.incidents = incidents
        self.event_support = event_support
        self.users = 0
        self.number = 0

    def nvmlInit(self) -> None:
        """Open the library; each call needs its own `nvmlShutdown`."""
        self.users += 1

    def nvmlShutdown(self) -> None:
        """Close the library for one of its users; the last close invalidates all handles."""
        self.check_open()
        self.users -= 1
        # Handles contain the number of their session, so handles of earlier sessions are rejected.
        if not self.users:
            self.number += 1

    def gpu(self, handle: Handle) -> SimulatedGpu:
        """Return the GPU of a handle.

        Like most NVML functions, raise NotSupported for the handle of an instance.
        """
        if isinstance(handle, MigHandle):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.whole_gpu(handle)

    def whole_gpu(self, handle: Handle) -> SimulatedGpu:
        """Return the GPU of a handle; for an instance's handle, the GPU that contains the instance.

        Raise Uninitialized if the library is not open, and InvalidArgument for an old handle.
        """
        self.check_open()
        if handle.session != self.number:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[handle.index]

    def windows_of(self, handle: Handle) -> SamplingWindows:
        """Return the driver's sampling windows of a GPU's utilization."""
        return self._windows[self.gpu(handle).facts.index]

    def process_windows_of(self, handle: Handle) -> SamplingWindows:
        """Return the driver's sampling windows of the processes on a GPU."""
        return self._process_windows[self.gpu(handle).facts.index]

    def check_open(self) -> None:
        """Raise Uninitialized if the library is not open."""
        if not self.users:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def stamp_us(self, since_epoch_ns: int) -> int:
        """Return the driver's timestamp of an instant, in microseconds on the node's wall clock."""
        return self.shown_ns(self.epoch_ns + since_epoch_ns) // 1000

    def _stamp_since_boot_us(self, since_epoch_ns: int) -> int:
        """Return the timestamp of an instant in microseconds since the driver was loaded."""
        # The driver is loaded at boot.
        return (since_epoch_ns - self.driver_loaded_ns) // 1000

    def since_epoch_ns(self) -> int:
        """Return the time since the scenario's start, in nanoseconds."""
        return self.clock.time_ns() - self.epoch_ns


class Subject:
    """The functions of one subject of the library, which share a session."""

    def __init__(self, session: Session) -> None:
        self._session = session


class Identity(Subject):
    """The functions that identify devices."""

    def nvmlSystemGetDriverVersion(self) -> str:
        """Return the driver's version."""
        self._session.check_open()
        return self._session.driver.version

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        self._session.check_open()
        return len(self._session.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        """Return the handle of a GPU; raise InvalidArgument if there is no GPU at the index."""
        self._session.check_open()
        if not 0 <= index < len(self._session.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(index, self._session.number)

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> Handle:
        """Return the handle of a GPU; raise NotFound if there is no GPU at the PCI address."""
        for index in range(self.nvmlDeviceGetCount()):
            if pci_bus_id(index) == pciBusId:
                return Handle(index, self._session.number)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        """Return the GPU's UUID."""
        return self._session.gpu(handle).facts.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        """Return the product name."""
        return self._session.gpu(handle).facts.name


_LANES: Final = 16
_SERIAL_DIGITS: Final = 13
_INFOROM: Final = {
    pynvml.NVML_INFOROM_OEM: "2.1",
    pynvml.NVML_INFOROM_ECC: "7.16",
}


class Board(Subject):
    """The functions that describe a GPU board."""

    def nvmlSystemGetNVMLVersion(self) -> str:
        """Return the library's version."""
        self._session.check_open()
        return f"13.{self._session.driver.version}"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        """Return the newest CUDA version that the driver supports."""
        self._session.check_open()
        return 13_000

    def nvmlSystemGetConfComputeState(self) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return whether confidential computing is on; raise NotSupported before Hopper."""
        mode = self._confidential_mode()
        state = pynvml.c_nvmlConfComputeSystemState_t()
        state.environment = (
            pynvml.NVML_CC_SYSTEM_ENVIRONMENT_UNAVAILABLE
            if mode == "off"
            else pynvml.NVML_CC_SYSTEM_ENVIRONMENT_PROD
        )
        state.ccFeature, state.devToolsMode = int(mode != "off"), int(mode == "devtools")
        return state

    def nvmlSystemGetConfComputeSettings(self, settings: Any) -> int:  # noqa: ANN401  # a reference to a struct
        """Fill in the confidential computing state and the multi-GPU mode; return an NVML code.

        If a confidential node has several GPUs, the GPUs use protected PCIe.
        """
        try:
            state = self.nvmlSystemGetConfComputeState()
        except pynvml.NVMLError as error:
            return int(error.value)
        struct = settings._obj  # noqa: SLF001  # what ctypes.byref refers to
        for name in ("environment", "ccFeature", "devToolsMode"):
            setattr(struct, name, getattr(state, name))
        is_protected = state.ccFeature and len(self._session.gpus) > 1
        struct.multiGpuMode = (
            pynvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE
            if is_protected
            else pynvml.NVML_CC_SYSTEM_MULTIGPU_NONE
        )
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetPlatformInfo(self, device: Handle, platformInfo: Any) -> int:  # noqa: ANN401  # a reference to a struct
        """Fill in a GPU's position in its rack; raise NotSupported if it is not in a rack."""
        facts = self._session.gpu(device).facts
        struct = platformInfo._obj  # noqa: SLF001  # what ctypes.byref refers to
        if facts.rack is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        struct.chassisSerialNumber = facts.rack.chassis_serial_number.encode()
        struct.slotNumber, struct.trayIndex = bytes([facts.rack.slot]), bytes([facts.rack.tray])
        struct.hostId, struct.moduleId = bytes([facts.rack.host]), bytes([facts.index + 1])
        return int(pynvml.NVML_SUCCESS)

    def _confidential_mode(self) -> str:
        """Return the mode of the node's first GPU whose mode is not `off`; `off` if there is none.

        Raise NotSupported if no GPU of the node supports confidential computing.
        """
        self._session.check_open()
        modes = [
            gpu.facts.confidential
            for gpu in self._session.gpus
            if gpu.facts.architecture.has_profiling
        ]
        if not modes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return next((mode for mode in modes if mode != "off"), "off")

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        """Return the minor number of the device file."""
        return self._session.gpu(handle).facts.index

    def nvmlDeviceGetSerial(self, handle: Handle) -> str:
        """Return the board's serial number."""
        drawn = uuid5(NAMESPACE_OID, self._session.gpu(handle).facts.uuid).int
        return str(drawn)[:_SERIAL_DIGITS]

    def nvmlDeviceGetPciInfo_v3(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the PCI address of the board, as bus number and bus id."""
        pci = pynvml.nvmlPciInfo_t()
        address = pci_bus_id(self._session.gpu(handle).facts.index)
        pci.bus = int(address.split(":")[1], 16)
        pci.busId = address.encode()
        return pci

    def nvmlDeviceGetBrand(self, handle: Handle) -> int:
        """Return the brand."""
        tesla = self._session.gpu(handle).facts.name.startswith("Tesla")
        return int(pynvml.NVML_BRAND_TESLA if tesla else pynvml.NVML_BRAND_NVIDIA)

    def nvmlDeviceGetArchitecture(self, device: Handle) -> int:
        """Return NVML's number of the GPU's generation."""
        return self._session.gpu(device).facts.architecture.number

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        """Return the CUDA compute capability."""
        return self._session.gpu(handle).facts.architecture.compute_capability

    def nvmlDeviceGetVbiosVersion(self, handle: Handle) -> str:
        """Return the version of the board's firmware."""
        self._session.gpu(handle)
        return "96.00.A5.00.01"

    def nvmlDeviceGetInforomImageVersion(self, handle: Handle) -> str:
        """Return the version of the board's InfoROM image."""
        self._session.gpu(handle)
        return "G520.0200.00.05"

    def nvmlDeviceGetInforomVersion(self, handle: Handle, infoRomObject: int) -> str:
        """Return the version of an InfoROM object; raise NotSupported for unknown objects."""
        self._session.gpu(handle)
        if infoRomObject not in _INFOROM:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _INFOROM[infoRomObject]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Handle) -> int:
        """Return the highest PCIe generation that GPU and slot support."""
        return self._session.gpu(handle).facts.model.pcie_generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Handle) -> int:
        """Return the number of PCIe lanes that GPU and slot support."""
        self._session.gpu(handle)
        return _LANES

    def nvmlDeviceGetEccMode(self, handle: Handle) -> list[int]:
        """Return the ECC mode, currently and after the next reboot; always enabled."""
        self._session.gpu(handle)
        return [pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_FEATURE_ENABLED]

    def nvmlDeviceGetPersistenceMode(self, handle: Handle) -> int:
        """Return the persistence mode; always enabled."""
        self._session.gpu(handle)
        return int(pynvml.NVML_FEATURE_ENABLED)

    def nvmlDeviceGetComputeMode(self, handle: Handle) -> int:
        """Return the compute mode; always the default."""
        self._session.gpu(handle)
        return int(pynvml.NVML_COMPUTEMODE_DEFAULT)

    def nvmlDeviceGetP2PStatus(self, device1: Handle, device2: Handle, p2pIndex: int) -> int:
        """Return whether two GPUs can reach each other by NVLink; both must have NVLinks."""
        if p2pIndex != pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        linked = all(self._session.gpu(one).facts.model.nvlinks for one in (device1, device2))
        status = pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return int(status)
