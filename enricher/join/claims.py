"""Who was on each GPU in a tick, and what is known of each: gathered per container.

Here processes become claims. How a GPU's quantities are split among claims is `books`' business.
"""

from dataclasses import dataclass

from gpuledger.records import Account, ContainerRef, GpuProcess, NodeSample


@dataclass(slots=True)
class Claim:
    """One account's claim on one GPU in one tick, summed over its processes there."""

    account: Account
    """`pod` or `host`."""
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

    def add(self, process: GpuProcess) -> None:
        """Add one process to the claim."""
        if process.sm_utilization_ratio is not None:
            self.sm_ratio = (self.sm_ratio or 0.0) + process.sm_utilization_ratio
        if process.memory_used_bytes is not None and not process.ended:
            self.memory_bytes = (self.memory_bytes or 0) + process.memory_used_bytes
        if process.ended:
            self.has_ended = True


def gather_claims(sample: NodeSample) -> list[list[Claim]]:
    """Give the claims on each GPU of the tick, in the order of the tick's `gpus`.

    A process without a container, or whose container shows neither id nor pod, is the host's.
    """
    containers = sample.containers
    found: list[dict[int | None, Claim]] = [{} for _ in sample.gpus]
    for process in sample.processes:
        on_gpu = found[process.gpu]
        claim = on_gpu.get(process.container)
        if claim is None:
            claim = on_gpu[process.container] = _open(process.container, containers)
        claim.add(process)
    return [_merge_host(on_gpu) for on_gpu in found]


def _open(position: int | None, containers: list[ContainerRef]) -> Claim:
    if position is None:
        return Claim(Account.HOST)
    container = containers[position]
    if container.container_id is None and container.pod_uid is None:
        return Claim(Account.HOST)
    return Claim(Account.POD, container.pod_uid, container.container_id)


def _merge_host(on_gpu: dict[int | None, Claim]) -> list[Claim]:
    """Make one host claim of several: containers that show nothing are the host's too."""
    claims = list(on_gpu.values())
    hosts = [claim for claim in claims if claim.account is Account.HOST]
    for other in hosts[1:]:
        _absorb(hosts[0], other)
        claims.remove(other)
    return claims


def _absorb(claim: Claim, other: Claim) -> None:
    if other.sm_ratio is not None:
        claim.sm_ratio = (claim.sm_ratio or 0.0) + other.sm_ratio
    if other.memory_bytes is not None:
        claim.memory_bytes = (claim.memory_bytes or 0) + other.memory_bytes
    claim.has_ended = claim.has_ended or other.has_ended
