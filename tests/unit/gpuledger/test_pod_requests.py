"""The amounts that a pod requests as a whole."""

import pytest

from gpuledger.pod_requests import requested_amounts
from gpuledger.records import ContainerRequest, PendingContainer

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"


def container(kind: str | None, **amounts: int) -> PendingContainer:
    names = {"gpu": GPU, "mig": MIG}
    resources = {names[name]: amount for name, amount in amounts.items()}
    requested = ContainerRequest(resources=resources)
    return PendingContainer(name="c", kind=kind, requested=requested)


def main(**amounts: int) -> PendingContainer:
    return container(None, **amounts)


def init(**amounts: int) -> PendingContainer:
    return container("init", **amounts)


def sidecar(**amounts: int) -> PendingContainer:
    return container("sidecar", **amounts)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([], {}),
        ([main()], {}),
        ([main(gpu=2), main(gpu=3, mig=1)], {GPU: 5, MIG: 1}),
        ([init(gpu=8), main(gpu=2)], {GPU: 8}),
        ([init(gpu=1), main(gpu=2)], {GPU: 2}),
        ([init(gpu=4), init(gpu=3), main(mig=1)], {GPU: 4, MIG: 1}),
        ([sidecar(gpu=1), main(gpu=2)], {GPU: 3}),
        ([sidecar(gpu=1), init(gpu=4), main(gpu=2)], {GPU: 5}),
        ([init(gpu=4), sidecar(gpu=1), main(gpu=2)], {GPU: 4}),
        ([main(gpu=2**63 - 1), main(gpu=2**63 - 1)], {GPU: 2**63 - 1}),
    ],
)
def test_a_pod_needs_the_most_that_its_containers_request_at_the_same_time(
    containers: list[PendingContainer], expected: dict[str, int]
) -> None:
    assert requested_amounts(containers) == expected
