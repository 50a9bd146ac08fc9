"""The load on a simulated GPU: a scenario that an agent plays, and its true use."""

import json
from pathlib import Path
from shlex import quote
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger_cli.known_load.request import LoadRequest, LoadResult
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.device import describe_gpu
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.schema import GpuGroup
from gpuledger_simulator.simulation import Simulation

_NODE: Final = "gpuledger-load"
_MODEL: Final = "NVIDIA H100 80GB HBM3"
_TRIALS: Final = 12
_TRIAL_SECONDS: Final = 30.0


def room_bytes() -> int:
    """Return the memory of the simulated GPU that processes can use."""
    return describe_gpu(GpuGroup(model=_MODEL), uuid="", index=0).room_bytes


class SimulatedLoad:
    """A scenario with a pod whose processes are the load, and its true use."""

    def __init__(self, request: LoadRequest, *, epoch_ns: int) -> None:
        self.epoch_ns = epoch_ns
        self.content = _scenario(request, busy_ratio=request.busy_ratio)
        if request.processes > 1:
            self._share(request)

    def _share(self, request: LoadRequest) -> None:
        """Bisect the ratio that each process requests, until the total is the requested ratio.

        Processes wait for each other, so each must request more than its share.
        """
        minimum, maximum = request.busy_ratio / request.processes, 1.0
        for _ in range(_TRIALS):
            trial = (minimum + maximum) / 2
            self.content = _scenario(request, busy_ratio=trial)
            ratios = self.result(min(_TRIAL_SECONDS, request.seconds)).busy_ratios
            if sum(ratios.values()) < request.busy_ratio:
                minimum = trial
            else:
                maximum = trial

    def result(self, seconds: float) -> LoadResult:
        """Return the true use from the start until `seconds` later."""
        clock = ManualClock(start_ns=self.epoch_ns)
        run = Simulation(parse_scenario(self.content), epoch_ns=self.epoch_ns, clock=clock)
        (gpu,) = run.node(_NODE).gpus
        end_ns = round(seconds * NS_PER_SECOND)
        return LoadResult(
            gpu_uuid=gpu.facts.uuid,
            start_ns=self.epoch_ns,
            end_ns=self.epoch_ns + end_ns,
            busy_ratios={one.pid: gpu.busy_ns(one, 0, end_ns) / end_ns for one in gpu.processes},
        )

    def write(self, file: Path) -> str:
        """Write the scenario; return the command that starts an agent which plays it."""
        file.write_text(f"{json.dumps(self.content, indent=2)}\n")
        return (
            f"GPULEDGER_NODE_NAME={_NODE} GPULEDGER_SIMULATOR__EPOCH_NS={self.epoch_ns}"
            f" gpuledger agent --no-kafka --process-series --source {quote(f'simulated:{file}')}"
        )


def _scenario(request: LoadRequest, *, busy_ratio: float) -> dict[str, Any]:
    process = {
        "command": _NODE,
        "gpus": [0],
        "memory_bytes": request.process_bytes,
        "load": {"busy_ratio": busy_ratio},
        "end_seconds": request.seconds,
    }
    container = {"name": "load", "processes": [process] * request.processes}
    pod = {"namespace": _NODE, "name": "load", "node": _NODE, "containers": [container]}
    return {"name": _NODE, "nodes": [{"name": _NODE, "gpus": {"model": _MODEL}}], "pods": [pod]}
