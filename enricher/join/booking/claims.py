"""Who was on each GPU in a tick, and what is known of each: gathered per container.

Here processes become claims. How a GPU's quantities are split among claims is `shares`' business.
"""

from typing import Final

from gpuledger.records import Account, ContainerRef, GpuProcess, NodeSample


class Claim:
    """One account's claim on one GPU in one tick, summed over its processes there.

    No Struct: its fields are C where the wheel is built, and some thirty are made for each tick.
    """

    __slots__ = ("account", "container", "has_ended", "memory_bytes", "sm_ratio")

    def __init__(
        self,
        account: Account,
        container: int | None = None,
        sm_ratio: float | None = None,
        memory_bytes: int | None = None,
        has_ended: bool = False,  # noqa: FBT001, FBT002  # by position, as keywords cost more
    ) -> None:
        self.account = account
        """`pod`, `host`, or `unattributed` for processes of which nothing could be read."""
        self.container = container
        """On a pod's: position of its container in the tick's `containers`."""
        self.sm_ratio = sm_ratio
        """Sum of its processes' SM utilization; absent where the driver gave none of them."""
        self.memory_bytes = memory_bytes
        """Device memory of its processes at the tick; absent where the driver gave none of them."""
        self.has_ended = has_ended
        """Whether one of its processes ended within the tick."""

    def add(self, process: GpuProcess) -> None:
        """Add what is known of one process; one that ended holds no memory any more."""
        if process.sm_utilization_ratio is not None:
            self.sm_ratio = (self.sm_ratio or 0.0) + process.sm_utilization_ratio
        if process.ended:
            self.has_ended = True
        elif process.memory_used_bytes is not None:
            self.memory_bytes = (self.memory_bytes or 0) + process.memory_used_bytes


def gather_claims(sample: NodeSample) -> list[list[Claim]]:
    """Return the claims on each GPU of the tick, in the order of its `gpus`, the host's last.

    A process without a container, or whose container shows neither id nor pod, is the host's. One
    whose start could not be read either was gone before it could be looked at: nobody's. Raises
    `IndexError` where a process points to a GPU or a container that the tick does not have.
    """
    homes = [
        _HOST if _shows_nothing(each) else place for place, each in enumerate(sample.containers)
    ]
    found: list[dict[int, Claim]] = [{} for _ in sample.gpus]
    for process in sample.processes:
        container = process.container
        if container is not None:
            home = homes[container]
        else:
            home = _NOBODY if process.started_boottime_ns is None else _HOST
        on_gpu = found[process.gpu]
        claim = on_gpu.get(home)
        if claim is None:
            on_gpu[home] = _open(home, process)
        else:
            claim.add(process)
    return [_with_host_last(on_gpu) for on_gpu in found]


def _with_host_last(on_gpu: dict[int, Claim]) -> list[Claim]:
    if _HOST in on_gpu:
        on_gpu[_HOST] = on_gpu.pop(_HOST)
    return list(on_gpu.values())


_HOST, _NOBODY = -1, -2
_ACCOUNTS: Final = {_HOST: Account.HOST, _NOBODY: Account.UNATTRIBUTED}
_POD: Final = Account.POD


def _shows_nothing(container: ContainerRef) -> bool:
    return container.container_id is None and container.pod_uid is None


def _open(home: int, first: GpuProcess) -> Claim:
    """Open a claim with what is known of its first process, as most have no second one."""
    ended = first.ended is True
    return Claim(
        _POD if home >= 0 else _ACCOUNTS[home],
        home if home >= 0 else None,
        first.sm_utilization_ratio,
        None if ended else first.memory_used_bytes,
        ended,
    )
