"""Pods that start and end on a node, from names only; a pod has ended once its cgroup is gone.

That holds however long the kubelet lists the pod, and is never guessed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random

import pytest

from gpuledger_agent.host.node_pods import (
    MAX_NAMES,
    PodCgroups,
    PodChanges,
    PodEnds,
    PodFolders,
    PodUids,
)
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.unit.deployment.components import ROOT

FIRST, SECOND, THIRD = (f"0000000{digit}-7d52-4b8e-a1f4-9c0d2e5b7a63" for digit in (1, 2, 3))

WRITTEN = FIRST.replace("-", "_")
STATIC = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"


class Pods:
    """A node's pod directories and cgroups, which a test sets."""

    def __init__(self) -> None:
        self.clock = ManualClock(start_ns=0)
        self.folders: list[str] = []
        self.cgroups: set[str] = set()
        self.others: set[str] = set()
        """Cgroups of other pods."""
        self.reads = 0
        folders = PodFolders(
            list_folders=self.list_folders,
            list_cgroups=lambda: self.cgroups | self.others,
            has_cgroup=lambda uid: uid in self.cgroups,
            clock=self.clock,
        )
        self.ends, self.uids = PodEnds(folders), PodUids(folders)

    def list_folders(self) -> list[str]:
        self.reads += 1
        return self.folders

    def has_ended(self) -> bool:
        ended = self.ends.find_ended({("research", "job")})
        self.clock.advance(1)
        return bool(ended)

    def find_uids(self) -> list[str]:
        self.clock.advance(1)
        return sorted(self.uids.find("research", "job"))


@dataclass(eq=False)
class Life:
    """A pod on a node."""

    uid: str
    name: str
    has_cgroup: bool = True
    has_folder: bool = False
    found_at: float = inf
    """The number of the first query since the pod's admission."""


class Node:
    """A node whose kubelet lists one pod of each name, and the agent's `PodEnds`."""

    def __init__(self) -> None:
        self.clock = ManualClock(start_ns=0)
        self.pods: list[Life] = []
        """The pods whose cgroup or directory exists; the first one is the agent's own."""
        self.listed: dict[str, Life] = {}
        self.response: dict[str, Life] = {}
        """The pods in the kubelet's last response."""
        self.count = self.queries = 0
        self.make_folder(self.admit("agent"))
        self.ends = PodEnds(
            PodFolders(
                list_folders=lambda: [
                    f"research_{pod.name}_{pod.uid}" for pod in self.pods if pod.has_folder
                ],
                list_cgroups=lambda: [
                    f"kubepods-burstable-pod{pod.uid.replace('-', '_')}.slice"
                    for pod in self.pods
                    if pod.has_cgroup
                ],
                has_cgroup=lambda uid: any(pod.uid == uid and pod.has_cgroup for pod in self.pods),
                clock=self.clock,
            )
        )

    def admit(self, name: str) -> Life:
        """Let the kubelet admit a pod, which removes a pod of the same name from its list."""
        self.count += 1
        pod = Life(f"{self.count:08}{FIRST[8:]}", name)
        self.pods.append(pod)
        self.listed[name] = pod
        return pod

    def make_folder(self, pod: Life) -> None:
        pod.has_folder = True

    def remove_folder(self, pod: Life) -> None:
        pod.has_folder = False

    def end(self, pod: Life) -> None:
        """End a pod; without a directory, it is deleted before its containers start."""
        pod.has_cgroup = False
        if not pod.has_folder and self.listed.get(pod.name) is pod:
            del self.listed[pod.name]

    def act(self, random: Random) -> None:
        """Let something happen to a pod."""
        pods = self.pods[1:]
        starting = [pod for pod in pods if pod.has_cgroup and not pod.has_folder]
        running = [pod for pod in pods if pod.has_cgroup]
        over = [pod for pod in pods if not pod.has_cgroup]
        match random.choice(["admit", "start", "start", "end", "end", "forget"]):
            case "admit":
                self.admit(random.choice(["web", "chat", "job"]))
            case "start" if starting:
                self.make_folder(random.choice(starting))
            case "end" if running:
                self.end(random.choice(running))
            case "forget" if over:
                pod = random.choice(over)
                if self.listed.get(pod.name) is pod:
                    del self.listed[pod.name]
                else:
                    self.remove_folder(pod)
            case _:
                pass

    def have_folders(self) -> bool:
        return all(pod.has_folder for pod in self.pods if pod.has_cgroup)

    def request(self) -> None:
        """Let the agent send a query, to which the kubelet responds at once."""
        self.clock.advance(1)
        self.ends.begin_query()
        self.queries += 1
        for pod in self.pods:
            pod.found_at = min(pod.found_at, self.queries)
        self.response = dict(self.listed)

    def ended(self) -> AbstractSet[str]:
        """Let the agent use the last response; return the names of the ended pods."""
        names = {("research", name) for name in self.response}
        self.ends.learn(names)
        ended = self.ends.find_ended(names)
        return {name for _, name in ended}

    def ended_now(self) -> AbstractSet[str]:
        """Let the agent query the kubelet; return the names of the ended pods."""
        self.request()
        return self.ended()


def test_a_pod_ends_with_its_cgroup_and_not_before_it_has_one() -> None:
    pods = Pods()
    assert not pods.has_ended(), "just allocated"
    pods.folders = [f"research_job_{FIRST}"]
    assert not pods.has_ended(), "no cgroup yet"
    pods.cgroups = {FIRST}
    assert not pods.has_ended()
    reads = pods.reads
    assert not any(pods.has_ended() for _ in range(10))
    assert pods.reads == reads, "a live pod causes no read of the directories"
    pods.cgroups = set()
    assert pods.has_ended()
    pods.folders = []
    assert pods.has_ended(), "the kubelet's response is older than the removal"


def test_a_pod_that_ended_before_the_agent_started_has_ended() -> None:
    pods = Pods()
    pods.folders, pods.others = [f"research_job_{FIRST}"], {SECOND}
    assert pods.has_ended(), "the kubelet creates the cgroup before the directory"
    pods.folders = [f"research_job_{FIRST}", f"research_job_{SECOND}"]
    pods.cgroups = {SECOND}
    assert not pods.has_ended(), "another pod has its name now"


def test_a_new_pod_with_the_name_of_an_ended_one_has_not_ended() -> None:
    pods = Pods()
    pods.folders, pods.cgroups = [f"research_job_{FIRST}"], {FIRST}
    assert not pods.has_ended()
    pods.folders, pods.cgroups = [f"research_job_{FIRST}", f"research_job_{SECOND}"], set()
    assert not pods.has_ended(), "the second has no cgroup yet"
    pods.cgroups = {SECOND}
    assert not pods.has_ended()
    pods.cgroups = set()
    assert pods.has_ended()


@pytest.mark.parametrize("folders", [[], ["research_job", f"other_job_{FIRST}", "x" * 5000]])
def test_a_pod_that_cannot_be_identified_has_not_ended(folders: list[str]) -> None:
    pods = Pods()
    pods.folders, pods.cgroups = folders, {FIRST}
    assert not pods.has_ended()
    pods.cgroups = set()
    assert not pods.has_ended()


def test_a_static_pod_ends_with_the_cgroup_of_its_hash() -> None:
    pods = Pods()
    pods.folders, pods.cgroups = [f"research_job_{STATIC}"], {STATIC}
    assert not pods.has_ended()
    pods.cgroups = set()
    assert pods.has_ended()


@pytest.mark.parametrize("uid", [FIRST, STATIC])
def test_a_pods_name_gives_its_uid_or_its_hash_if_it_is_static(uid: str) -> None:
    pods = Pods()
    pods.folders = [f"research_job_{uid}", f"other_job_{SECOND}", "research_job", "job_x"]
    assert pods.find_uids() == [uid], "no cgroup is visible on this node"
    pods.cgroups = {uid}
    assert pods.find_uids() == [uid]


def test_directories_of_one_name_count_only_with_a_cgroup_if_any_has_one() -> None:
    pods = Pods()
    pods.folders = [f"research_job_{FIRST}", f"research_job_{SECOND}"]
    assert pods.find_uids() == [FIRST, SECOND]
    pods.cgroups = {FIRST}
    assert pods.find_uids() == [FIRST]
    pods.cgroups = {FIRST, SECOND}
    assert pods.find_uids() == [FIRST, SECOND], "while one pod ends and the next begins"
    pods.cgroups = {SECOND}
    assert pods.find_uids() == [SECOND]


def test_the_directory_of_a_former_pod_is_not_taken_for_the_next_one() -> None:
    pods = Pods()
    pods.folders, pods.cgroups = [f"research_job_{FIRST}"], {SECOND}
    assert pods.find_uids() == [], "the next one has devices and a cgroup, but no directory yet"


def test_a_played_statefulsets_pod_has_its_own_uid_before_and_after_its_restart() -> None:
    clock = ManualClock(start_ns=0)
    scenario = load_scenario(ROOT / "scenarios" / "e2e.yaml")
    simulation = Simulation(scenario, epoch_ns=0, clock=clock)
    names = Counter((pod.spec.namespace, pod.spec.name) for pod in simulation.pods)
    (twice,) = [name for name, count in names.items() if count == 2]
    same = [pod for pod in simulation.pods if (pod.spec.namespace, pod.spec.name) == twice]
    kubelet = simulation.node(same[0].spec.node).kubelet
    folders = PodFolders(
        list_folders=kubelet.pod_folders,
        list_cgroups=kubelet.pod_cgroups,
        has_cgroup=kubelet.has_cgroup,
        clock=clock,
    )
    uids = PodUids(folders)
    found = {tuple(one_second_later(uids, clock, twice)) for _ in range(120)}
    assert found - {()} == {(simulation.uid(pod),) for pod in same}


def one_second_later(uids: PodUids, clock: ManualClock, pod: tuple[str, str]) -> Sequence[str]:
    clock.advance(1)
    return uids.find(*pod)


def test_any_number_of_uid_lookups_read_the_directories_at_most_twice_a_second() -> None:
    pods = Pods()
    for number in range(100):
        pods.uids.find("research", f"pod-{number}")
    assert pods.reads == 1


def test_any_number_of_checks_read_the_directories_at_most_twice_a_second() -> None:
    pods = Pods()
    for number in range(100):
        pods.ends.find_ended({("research", f"pod-{number}")})
    pods.clock.advance(0.5)
    pods.ends.find_ended({("research", "pod-0")})
    assert pods.reads == 2


def test_pods_have_changed_when_either_list_has_another_name() -> None:
    folders, cgroups = ["a"], [f"pod{FIRST}"]
    changes = PodChanges(lambda: folders, lambda: cgroups)
    assert changes.have_changed(), "the first check reports a change"
    assert not changes.have_changed()
    cgroups = [f"pod{FIRST}", f"pod{SECOND}"]
    assert changes.have_changed()
    folders = ["a", "b"]
    assert changes.have_changed(), "claims are prepared after the cgroup is created"
    folders = ["b", "c"]
    assert changes.have_changed(), "the same number of different names"
    assert not changes.have_changed()


def test_at_most_max_names_are_read_from_a_directory() -> None:
    def endless() -> Iterator[str]:
        for number in range(10 * MAX_NAMES):
            assert number <= MAX_NAMES
            yield f"name-{number}"

    changes = PodChanges(endless, tuple)
    assert changes.have_changed()
    assert not changes.have_changed()


@pytest.mark.parametrize("hierarchy", ["", "memory/", "pids/"])
@pytest.mark.parametrize(
    "folder",
    [
        f"kubepods.slice/kubepods-pod{WRITTEN}.slice",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{WRITTEN}.slice",
        f"kubepods/pod{FIRST}",
        f"kubepods/besteffort/pod{FIRST}",
    ],
)
def test_a_pods_cgroup_is_found_in_either_form(tmp_path: Path, hierarchy: str, folder: str) -> None:
    made = tmp_path / f"{hierarchy}{folder}"
    made.parent.mkdir(parents=True)
    cgroups = PodCgroups(tmp_path)
    assert not cgroups.has_cgroup(FIRST)
    listed = cgroups.list_names()
    made.mkdir()
    assert set(cgroups.list_names()) - set(listed) == {made.name}
    assert cgroups.has_cgroup(FIRST)
    assert not cgroups.has_cgroup(SECOND)
    made.rmdir()
    assert not cgroups.has_cgroup(FIRST)
    assert cgroups.list_names() == listed


def test_a_pod_with_the_name_of_an_ended_one_runs_before_it_has_a_directory() -> None:
    """As in a StatefulSet: the kubelet creates the directory after it has mounted the volumes."""
    node = Node()
    first = node.admit("web")
    node.make_folder(first)
    assert node.ended_now() == set()
    node.end(first)
    assert node.ended_now() == {"web"}
    second = node.admit("web")
    assert node.ended_now() == set()
    node.remove_folder(first)
    assert node.ended_now() == set(), "the kubelet has removed the former pod's logs"
    listed, node.listed = node.listed, {}
    assert node.ended_now() == set(), "the kubelet restarts"
    node.listed = listed
    assert node.ended_now() == set()
    node.make_folder(second)
    assert node.ended_now() == set()
    node.end(second)
    assert node.ended_now() == {"web"}


def test_a_pod_that_cannot_mount_its_volumes_does_not_make_ended_pods_run() -> None:
    node = Node()
    job = node.admit("job")
    node.make_folder(job)
    assert node.ended_now() == set()
    node.admit("stuck")
    assert node.ended_now() == set()
    node.end(job)
    assert node.ended_now() == {"job"}
    other = node.admit("other")
    assert node.ended_now() == {"job"}
    node.make_folder(other)
    assert node.ended_now() == {"job"}
    node.end(other)
    assert node.ended_now() == {"job", "other"}


def test_a_pod_that_was_deleted_by_force_does_not_end_the_next_one_of_its_name() -> None:
    """The kubelet lists the next pod while the former one still runs."""
    node = Node()
    first = node.admit("web")
    node.make_folder(first)
    assert node.ended_now() == set()
    second = node.admit("web")
    assert node.ended_now() == set()
    node.end(first)
    assert node.ended_now() == set()
    node.make_folder(second)
    assert node.ended_now() == set()


def test_a_pod_has_ended_although_a_former_one_of_its_name_still_runs_after_a_forced_deletion() -> (
    None
):
    node = Node()
    first = node.admit("web")
    node.make_folder(first)
    assert node.ended_now() == set()
    second = node.admit("web")
    assert node.ended_now() == set()
    node.make_folder(second)
    assert node.ended_now() == set()
    node.end(second)
    assert node.ended_now() == {"web"}
    node.remove_folder(second)
    assert node.ended_now() == {"web"}, "the kubelet still lists it"
    third = node.admit("web")
    assert node.ended_now() == set()
    node.make_folder(third)
    assert node.ended_now() == set()
    node.end(third)
    assert node.ended_now() == {"web"}


def test_if_two_pods_of_a_name_run_when_the_agent_starts_the_listed_one_may_be_either() -> None:
    node = Node()
    pods = [node.admit("web"), node.admit("web")]
    for pod in pods:
        node.make_folder(pod)
    assert node.ended_now() == set()
    node.end(pods[1])
    assert node.ended_now() == set()
    node.end(pods[0])
    assert node.ended_now() == {"web"}


def test_if_the_agent_starts_while_a_pod_starts_no_pod_that_may_be_this_one_has_ended() -> None:
    node = Node()
    for name in ("web", "job"):
        pod = node.admit(name)
        node.make_folder(pod)
        node.end(pod)
    other = node.admit("other")
    node.make_folder(other)
    second = node.admit("web")
    assert node.ended_now() == set(), "the cgroup may belong to either"
    node.end(other)
    assert node.ended_now() == {"other"}, "it ran when the agent started"
    node.make_folder(second)
    assert node.ended_now() == {"job", "other"}


def test_a_running_pod_never_counts_as_ended_and_an_ended_one_does_once_it_is_certain() -> None:
    """Pods of few names live for seconds, and responses may be a second late.

    The end of a pod is certain at the latest when every cgroup has a directory, unless the agent
    found a running pod of the same name at the same time.
    """
    for seed in range(1000):
        random = Random(seed)  # noqa: S311  # a history, no secret
        node = Node()
        for _ in range(30):
            node.request()
            is_late, is_certain = random.random() < 0.2, node.have_folders()
            for _ in range(random.choice([0, 0, 1, 1, 2, 3]) if is_late else 0):
                node.act(random)
            ended = node.ended()
            running = {(pod.name, pod.found_at) for pod in node.pods if pod.has_cgroup}
            for name, pod in node.response.items():
                assert not (pod.has_cgroup and name in ended), seed
                is_over = pod.has_folder and (name, pod.found_at) not in running
                assert name in ended or not (is_over and is_certain), seed
            for _ in range(random.choice([0, 0, 1, 1, 2, 3])):
                node.act(random)
