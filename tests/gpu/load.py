"""A CUDA process with a known load: kernels run for a fixed part of each second.

The tests run it as a separate program. It needs only the driver's library: the kernel is PTX, which
the driver compiles, and spins by the GPU's clock. Two such processes whose parts of the second do
not overlap have exactly their configured loads, however the driver schedules contexts that want to
run at the same time.
"""

import argparse
import sys
import time
from typing import Final

from gpuledger_cli.known_load.cuda_load import Cuda

KERNEL_NS: Final = 10_000_000
SECOND_NS: Final = 1_000_000_000


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
