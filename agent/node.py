"""What an agent meets on its node, whether that is real, played or recorded. Values only."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.gpu.protocol import GpuSource
from agent.host.kmsg import Kmsg
from agent.host.kubelet.client import Kubelet
from agent.host.kubelet.container_logs import ListNames
from agent.host.procfs import Procfs
from gpuledger.clock import Clock


def _no_names() -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node to be read."""

    gpus: GpuSource
    """Its GPUs."""
    procfs: Procfs
    """The files of `/proc`."""
    clock: Clock
    """The clocks."""
    kubelet: Kubelet | None = None
    """Who says which container holds which device; `None` where nobody is to be asked."""
    list_log_names: ListNames = _no_names
    """Gives the names of the containers' logs."""
    open_kmsg: Callable[[], Kmsg] | None = None
    """Opens the kernel's log at its end; `None` where it is not to be read."""
