"""What a program does before it imports anything: signals count from its first instruction on.

Nothing here may import what takes time. The interpreter's own start, before the first line of any
module of ours, cannot be covered from Python.
"""

import os
import signal


def end_on_signals() -> None:
    """Make SIGTERM and SIGINT end the process with exit code 0, until the work takes them over.

    For a deployable's first line: nothing has begun that would have to be cleaned up. As the first
    process of a container it would otherwise not even end, as Linux spares that from both.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def end_on_interrupt(code: int) -> None:
    """Make SIGINT end the process with this exit code, until `raise_on_interrupt`."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))


def raise_on_interrupt() -> None:
    """Make SIGINT raise `KeyboardInterrupt`, as Python itself does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
