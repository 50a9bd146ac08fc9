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
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

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
        identity = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", identity, self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(identity))}"

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


class Ready(NamedTuple):
    """A process has its memory, and waits for the start."""

    gpu_uuid: str


class Done(NamedTuple):
    """A process has ended its load."""

    busy_ns: int
    end_ns: int


class Failed(NamedTuple):
    """A process cannot load the GPU."""

    problem: str


class _Child(NamedTuple):
    """A process of the load, and this process's end of its pipe."""

    process: BaseProcess
    pipe: "Connection[Any, Any]"

    def receive(self) -> Any:  # noqa: ANN401  # as `_work` sends it
        """Return the next message; raises UserError if the process failed."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            if self.process.exitcode == -signal.SIGTERM:
                raise KeyboardInterrupt from error  # the signal came before its handler was set
            message = Failed(f"a process ended with exit code {self.process.exitcode}")
        if isinstance(message, Failed):
            raise UserError(
                f"cannot load the GPU: {message.problem}; check the driver, --gpu and --memory-mib,"
                " or use --simulated"
            )
        return message


def load_gpu(request: LoadRequest) -> LoadResult:
    """Load the GPU until the end, SIGTERM or Ctrl-C; raises UserError if CUDA cannot be used."""
    # Children inherit this, so that Ctrl-C reaches only this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = _start(request)

    def stop(*_: object) -> None:
        for child in children:
            child.process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        ready: list[Ready] = [child.receive() for child in children]
        start_ns = time.monotonic_ns() + _LEAD_NS
        for child in children:
            child.pipe.send(start_ns)
        done: list[Done] = [child.receive() for child in children]
    finally:
        stop()
        for child in children:
            child.process.join()
    end_ns = max(each.end_ns for each in done)
    wall_offset_ns = time.time_ns() - time.monotonic_ns()
    return LoadResult(
        gpu_uuid=ready[0].gpu_uuid,
        start_ns=wall_offset_ns + start_ns,
        end_ns=wall_offset_ns + end_ns,
        busy_ratios={
            child.process.pid or 0: each.busy_ns / (end_ns - start_ns)
            for child, each in zip(children, done, strict=True)
        },
    )


def _start(request: LoadRequest) -> list[_Child]:
    # The index of the GPU is then the same as in NVML.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    context = multiprocessing.get_context("spawn")
    children = []
    for place in range(request.processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, request, place), daemon=True)
        process.start()
        theirs.close()
        children.append(_Child(process, ours))
    return children


def _work(parent: "Connection[Any, Any]", request: LoadRequest, place: int) -> None:
    """Send `Ready`, receive the start, and send `Done`; or send `Failed`."""
    try:
        cuda = Cuda(request.gpu)
        cuda.hold(request.process_bytes)
        parent.send(Ready(cuda.uuid()))
        parent.send(_run(cuda, parent.recv(), request, place))
    except (OSError, AttributeError) as error:
        parent.send(Failed(str(error)))


def _run(cuda: Cuda, start_ns: int, request: LoadRequest, place: int) -> Done:
    """Run kernels until the end, SIGTERM or the parent's end."""
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
    return Done(busy_ns, time.monotonic_ns())


def _sleep_until(time_ns: int) -> None:
    time.sleep(max(0, time_ns - time.monotonic_ns()) / NS_PER_SECOND)
