"""Pods as the kubelet lists them, with annotations of schedulers that share GPUs."""

from collections.abc import Mapping, Sequence

from gpuledger_agent.host.kubelet.pod_list import (
    ListedContainer,
    ListedMetadata,
    ListedPod,
    ListedResources,
    ListedSpec,
    ListedStatus,
)

NODE = "node-1"


def pod(
    annotations: Mapping[str, str] | None = None,
    *containers: str | tuple[str, Mapping[str, str]],
    name: str = "chat-0",
    namespace: str = "serving",
    labels: Mapping[str, str] | None = None,
    init: Sequence[str] = (),
    phase: str = "Running",
    created: str | None = None,
) -> ListedPod:
    """Return a pod; a container is a name, or a name and its limits."""
    return ListedPod(
        metadata=ListedMetadata(
            uid=name,
            name=name,
            namespace=namespace,
            labels=labels,
            annotations=annotations,
            creation_timestamp=created,
        ),
        spec=ListedSpec(
            node_name=NODE,
            containers=[
                ListedContainer(one)
                if isinstance(one, str)
                else ListedContainer(one[0], ListedResources(limits=one[1]))
                for one in containers or ("main",)
            ],
            init_containers=[ListedContainer(one) for one in init],
        ),
        status=ListedStatus(phase=phase),
    )
