"""A CUDA process with a known load: kernels run for a fixed part of each second.

The tests run it as a separate program. It needs only the driver's library: the kernel is PTX, which
the driver compiles, and spins by the GPU's clock. Two such processes whose parts of the second do
not overlap have exactly their configured loads, however the driver schedules contexts that want to
run at the same time.
"""

import argparse
import ctypes
import sys
import time
from typing import Final

PTX: Final = b"""
.version 7.0
.target sm_60
.address_size 64
.visible .entry spin(.param .u64 spin_ns)
{
    .reg .u64 %start, %now, %wanted;
    .reg .pred %not_yet;
    ld.param.u64 %wanted, [spin_ns];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %not_yet, %now, %wanted;
    @%not_yet bra again;
    ret;
}
\0"""
KERNEL_NS: Final = 10_000_000
SECOND_NS: Final = 1_000_000_000


class Cuda:
    """The few driver calls that are needed; each raises OSError with the CUDA error code."""

    def __init__(self, device: int, *, ptx: bytes = PTX, kernel: bytes = b"spin") -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ptx)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, kernel)

    def hold(self, size_bytes: int) -> None:
        """Allocate device memory until the process ends."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))

    def spin(self, nanoseconds: int) -> None:
        """Run one kernel for this time, and wait for it."""
        wanted = ctypes.c_uint64(nanoseconds)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(wanted))
        one = ctypes.c_uint(1)
        nothing = ctypes.c_void_p()
        self._call(
            "cuLaunchKernel", self._kernel, one, one, one, one, one, one, ctypes.c_uint(0),
            nothing, parameters, nothing,
        )  # fmt: skip
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} returned {code}")


def main() -> None:
    """Run for `--seconds`: in each second, `--busy` seconds from `--from`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--from", type=float, default=0.0, dest="start")
    parser.add_argument("--busy", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--hold-bytes", type=int, default=0)
    given = parser.parse_args()
    cuda = Cuda(given.device)
    if given.hold_bytes:
        cuda.hold(given.hold_bytes)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    until_ns = time.time_ns() + round(given.seconds * SECOND_NS)
    while time.time_ns() < until_ns:
        _wait_for(given.start)
        work(cuda, round(given.busy * SECOND_NS))


def work(cuda: Cuda, busy_ns: int) -> None:
    """Keep the GPU busy for this time."""
    until_ns = time.time_ns() + busy_ns
    while (left_ns := until_ns - time.time_ns()) > 0:
        cuda.spin(min(KERNEL_NS, left_ns))


def _wait_for(part: float) -> None:
    """Sleep until the wall clock reaches that part of a second."""
    time.sleep((part - time.time()) % 1.0)


if __name__ == "__main__":
    main()
