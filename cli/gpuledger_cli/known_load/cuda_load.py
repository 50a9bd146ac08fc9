"""The load on a real GPU, by CUDA's driver library: a process for each share.

The processes run one after the other in each period, so that their kernels never overlap. The
kernel is PTX, which the driver compiles, and spins by the GPU's clock.
"""

import ctypes
import multiprocessing
import os
import signal
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UserError
from gpuledger_cli.known_load.request import LoadRequest, LoadResult

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
_PERIOD_NS: Final = 100_000_000
_LEAD_NS: Final = 50_000_000
"""Time until all processes have received the start."""


class Cuda:
    """The few driver calls that are needed; each raises OSError with the CUDA error code."""

    def __init__(self, device: int, *, ptx: bytes = PTX, kernel: bytes = b"spin") -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ptx)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, kernel)

    def uuid(self) -> str:
        """Return the UUID of the GPU in NVML's form."""
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", found, self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"

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


def load_gpu(request: LoadRequest) -> LoadResult:
    """Load the GPU until the end, SIGTERM or Ctrl-C; raises UserError if CUDA cannot be used."""
    # The index is then the same as in NVML.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # Children inherit this, so that Ctrl-C reaches only this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(request.processes)]
    children = [
        context.Process(target=_work, args=(theirs, request, place), daemon=True)
        for place, (_, theirs) in enumerate(pairs)
    ]
    for child in children:
        child.start()

    def stop(*_: object) -> None:
        for child in children:
            child.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for _, theirs in pairs:
        theirs.close()
    try:
        uuids = [_receive(ours) for ours, _ in pairs]
        start_ns = time.monotonic_ns() + _LEAD_NS
        for ours, _ in pairs:
            ours.send(start_ns)
        done = [_receive(ours) for ours, _ in pairs]
    finally:
        stop()
        for child in children:
            child.join()
    end_ns = max(ended_ns for _, ended_ns in done)
    boot_ns = time.time_ns() - time.monotonic_ns()
    pids = [child.pid or 0 for child in children]
    ratios = [busy_ns / (end_ns - start_ns) for busy_ns, _ in done]
    return LoadResult(
        gpu_uuid=uuids[0],
        start_ns=boot_ns + start_ns,
        end_ns=boot_ns + end_ns,
        busy_ratios=dict(zip(pids, ratios, strict=True)),
    )


def _receive(child: "Connection[Any, Any]") -> Any:  # noqa: ANN401  # as `_work` sends it
    try:
        received = child.recv()
    except (EOFError, OSError) as error:
        raise KeyboardInterrupt from error  # a signal ended the process before it began
    if isinstance(received, str) and not received.startswith("GPU-"):
        raise UserError(
            f"cannot load the GPU: {received}; check the driver, --gpu and --memory-mib, or use"
            " --simulated"
        )
    return received


def _work(parent: "Connection[Any, Any]", request: LoadRequest, place: int) -> None:
    """Send the GPU's UUID, receive the start, and send busy time and end; or send an error."""
    try:
        cuda = Cuda(request.gpu)
        cuda.hold(request.process_bytes)
        parent.send(cuda.uuid())
        parent.send(_run(cuda, parent.recv(), request, place))
    except (OSError, AttributeError) as error:
        parent.send(str(error))


def _run(cuda: Cuda, start_ns: int, request: LoadRequest, place: int) -> tuple[int, int]:
    """Run kernels until the end, SIGTERM or the parent's end; return busy time and end."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    parent_pid = os.getppid()
    end_ns = start_ns + round(request.seconds * NS_PER_SECOND)
    spin_ns = round(_PERIOD_NS * request.busy_ratio / request.processes)
    next_ns, busy_ns = start_ns + place * _PERIOD_NS // request.processes, 0
    while not stopped and os.getppid() == parent_pid:
        _sleep_until(min(next_ns, end_ns))
        began_ns = time.monotonic_ns()
        if began_ns >= end_ns or stopped:
            break
        cuda.spin(min(spin_ns, end_ns - began_ns))
        busy_ns += time.monotonic_ns() - began_ns
        # After a delay, periods are left out: kernels without pauses would be another load.
        next_ns = max(next_ns + _PERIOD_NS, time.monotonic_ns() - _PERIOD_NS)
    return busy_ns, time.monotonic_ns()


def _sleep_until(time_ns: int) -> None:
    time.sleep(max(0, time_ns - time.monotonic_ns()) / NS_PER_SECOND)
