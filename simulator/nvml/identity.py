"""Which GPUs there are and what never changes of them."""
# ruff: noqa: N802  # NVML's own names

import pynvml

from simulator.nvml.session import Handle, Session


class Identity(Session):
    """The functions that say which device is which."""

    def nvmlSystemGetDriverVersion(self) -> str:
        """Return the driver's version."""
        self._check_open()
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        self._check_open()
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        """Return the handle of a GPU."""
        self._check_open()
        if not 0 <= index < len(self._gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(index, self._session)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        """Return the GPU's UUID."""
        return self._gpu(handle).facts.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        """Return the product's name."""
        return self._gpu(handle).facts.name
