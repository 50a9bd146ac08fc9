"""Who was on each GPU in a tick, and what is known of each: gathered per container.

Here processes become claims. How a GPU's quantities are split among claims is `shares`' business.
"""

import msgspec

from gpuledger.records import Account, ContainerRef, GpuProcess, NodeSample


class Claim(msgspec.Struct, gc=False):
    """One account's claim on one GPU in one tick, summed over its processes there.

    A Struct, because some thirty are made for each tick.
    """

    account: Account
    """`pod`, `host`, or `unattributed` for processes of which nothing could be read."""
    pod_uid: str | None = None
    """The pod's UID as the cgroup shows it."""
    container_id: str | None = None
    """The container's id as the cgroup shows it."""
    sm_ratio: float | None = None
    """Sum of its processes' SM utilization; absent where the driver gave none of them."""
    memory_bytes: int | None = None
    """Device memory of its processes at the tick; absent where the driver gave none of them."""
    has_ended: bool = False
    """Whether one of its processes ended within the tick."""

    def add(self, sm_ratio: float | None, memory_bytes: int | None, *, has_ended: bool) -> None:
        """Add what is known of one process, or of another claim."""
        if sm_ratio is not None:
            self.sm_ratio = (self.sm_ratio or 0.0) + sm_ratio
        if memory_bytes is not None:
            self.memory_bytes = (self.memory_bytes or 0) + memory_bytes
        if has_ended:
            self.has_ended = True


def gather_claims(sample: NodeSample) -> list[list[Claim]]:
    """Give the claims on each GPU of the tick, in the order of the tick's `gpus`.

    A process without a container, or whose container shows neither id nor pod, is the host's. One
    whose start could not be read either was gone before it could be looked at: nobody's.
    """
    containers = sample.containers
    found: list[dict[int, Claim]] = [{} for _ in sample.gpus]
    for process in sample.processes:
        place = _place(process)
        on_gpu = found[process.gpu]
        claim = on_gpu.get(place)
        if claim is None:
            claim = on_gpu[place] = _open(place, containers)
        ended = bool(process.ended)
        held = None if ended else process.memory_used_bytes
        claim.add(process.sm_utilization_ratio, held, has_ended=ended)
    return [_merge_host(list(on_gpu.values())) for on_gpu in found]


_HOST, _NOBODY = -1, -2


def _place(process: GpuProcess) -> int:
    if process.container is not None:
        return process.container
    return _NOBODY if process.started_boottime_ns is None else _HOST


def _open(place: int, containers: list[ContainerRef]) -> Claim:
    if place == _NOBODY:
        return Claim(Account.UNATTRIBUTED)
    if place == _HOST:
        return Claim(Account.HOST)
    container = containers[place]
    if container.container_id is None and container.pod_uid is None:
        return Claim(Account.HOST)
    return Claim(Account.POD, container.pod_uid, container.container_id)


def _merge_host(claims: list[Claim]) -> list[Claim]:
    """Make one host claim of several: containers that show nothing are the host's too."""
    hosts = [claim for claim in claims if claim.account is Account.HOST]
    for other in hosts[1:]:
        hosts[0].add(other.sm_ratio, other.memory_bytes, has_ended=other.has_ended)
        claims.remove(other)
    return claims
