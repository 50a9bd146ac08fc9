"""What is planned of one run of a scenario, and who is who in it; nothing is at work here."""

from gpuledger_simulator.identities import DerivedUids, Uids
from gpuledger_simulator.plan import PlannedPod, plan_pods
from gpuledger_simulator.schema import Scenario


class PlannedRun:
    """A scenario from an epoch on: scenario second s happens at `epoch_ns + s * 1e9`."""

    def __init__(self, scenario: Scenario, *, epoch_ns: int, uids: Uids | None = None) -> None:
        self.scenario = scenario
        self.epoch_ns = epoch_ns
        self._drawn_uids = DerivedUids(seed=scenario.seed, epoch_ns=epoch_ns)
        self.uids = uids or self._drawn_uids
        self.pods = plan_pods(scenario, epoch_ns=epoch_ns)

    def uid(self, pod: PlannedPod) -> str:
        """Return the UID of a pod, a drawn one where the API server has given none."""
        return self.given_uid(pod) or self._drawn_uids.uid(pod.key)

    def given_uid(self, pod: PlannedPod) -> str | None:
        """Return the UID of a pod as its node knows it; None before the API server gave one."""
        return (self.uids if pod.spec.in_api else self._drawn_uids).uid(pod.key)
