"""The agent of a simulated node that queries the kubelet through its socket, as on a real node.

Usually the simulated kubelet is a part of the agent's process, and cannot fail without it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuledger_agent import source_selection
from gpuledger_agent.__main__ import main
from gpuledger_agent.host.kubelet.allocations import SocketKubelet

if TYPE_CHECKING:
    from gpuledger_agent.context import Host
    from gpuledger_simulator.simulation import SimulatedNode

_ANSWER_SECONDS: Final = 1.0
_play: Final = source_selection.play


def play(node: SimulatedNode) -> Host:
    """Return the interfaces of a simulated node; its kubelet is another process."""
    socket = Path(os.environ["GPULEDGER_KUBELET__SOCKET"])
    return replace(_play(node), kubelet=SocketKubelet(socket, timeout_seconds=_ANSWER_SECONDS))


if __name__ == "__main__":
    source_selection.play = play
    main()
