"""The plan of one run: the scenario's pods and their UIDs, without clocks or processes."""

from gpuledger_simulator.identities import DerivedUids, Uids
from gpuledger_simulator.plan import PlannedPod, plan_pods
from gpuledger_simulator.schema import Scenario


class PlannedRun:
    """A scenario with an epoch: scenario second s happens at `epoch_ns + s * 1e9`."""

    def __init__(self, scenario: Scenario, *, epoch_ns: int, uids: Uids | None = None) -> None:
        self.scenario = scenario
        self.epoch_ns = epoch_ns
        self._drawn_uids = DerivedUids(seed=scenario.seed, epoch_ns=epoch_ns)
        self.uids = uids or self._drawn_uids
        self.pods = plan_pods(scenario, epoch_ns=epoch_ns)

    def uid(self, pod: PlannedPod) -> str:
        """Return a pod's UID; a derived UID if the API server has not assigned one."""
        return self.given_uid(pod) or self._drawn_uids.uid(pod.key)

    def given_uid(self, pod: PlannedPod) -> str | None:
        """Return a pod's UID, or `None` if the API server has not assigned it yet.

        A pod that is not in the API server always has a derived UID.
        """
        return (self.uids if pod.spec.in_api else self._drawn_uids).uid(pod.key)
