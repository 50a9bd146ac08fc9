"""Pods that start and end on a node, from names only; a pod has ended once its cgroup is gone.

That holds however long the kubelet lists the pod, and is never guessed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from gpuledger_agent.host.node_pods import (
    MAX_NAMES,
    Namesakes,
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
        self.listed = Namesakes(folders)

    def list_folders(self) -> list[str]:
        self.reads += 1
        return self.folders

    def has_ended(self) -> bool:
        ended = self.ends.find_ended({("research", "job")})
        self.clock.advance(1)
        return bool(ended)

    def run(self, *uids: str) -> None:
        """Let pods with these UIDs run; the directories of former pods stay."""
        self.cgroups = set(uids)
        self.folders = sorted({*self.folders, *(f"research_job_{uid}" for uid in uids)})

    def ended_of(self, *devices: str) -> set[str]:
        """Let the kubelet list a pod with each of these devices; return those of ended pods."""
        listed = [(("research", "job"), frozenset(filter(None, [one]))) for one in devices]
        self.clock.advance(1)
        self.listed.learn(listed)
        return {
            f"{position}:{devices[position]}"
            for position in self.listed.find_ended_positions(listed)
        }

    def find_uids(self) -> list[str]:
        self.clock.advance(1)
        return sorted(self.uids.find("research", "job"))


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


def test_each_pod_of_a_name_has_the_devices_that_no_earlier_pod_has() -> None:
    pods = Pods()
    pods.run(FIRST)
    assert pods.ended_of("gpu-0") == set()
    pods.run()
    assert pods.ended_of("gpu-0") == set(), "`PodEnds` finds it by its name"
    pods.run(SECOND)
    for _ in range(2):
        assert pods.ended_of("gpu-1", "gpu-0") == {"1:gpu-0"}, "also before its devices are known"
    pods.run(THIRD)
    for _ in range(2):
        assert pods.ended_of("gpu-2", "gpu-1", "gpu-0") == {"1:gpu-1", "2:gpu-0"}


@pytest.mark.parametrize("second", ["gpu-0", "gpu-1"])
def test_a_pod_that_was_deleted_but_still_runs_has_not_ended(second: str) -> None:
    """Whether the next pod of its name has other devices or the same devices."""
    pods = Pods()
    pods.run(FIRST)
    pods.ended_of("gpu-0")
    pods.run(FIRST, SECOND)
    assert pods.ended_of("gpu-0", second) == set()
    assert pods.ended_of("gpu-0", second) == set()
    pods.run(SECOND)
    assert pods.ended_of("gpu-0", second) == {"0:gpu-0"}
    assert pods.ended_of(second) == set(), "the kubelet no longer lists the former pod"


@pytest.mark.parametrize("second", ["gpu-0", "gpu-1"])
def test_a_pod_that_starts_while_the_kubelet_responds_does_not_get_the_devices_of_another(
    second: str,
) -> None:
    pods = Pods()
    pods.run(FIRST)
    pods.ended_of("gpu-0")
    pods.run(SECOND)
    assert pods.ended_of("gpu-0") == set(), "the response is older than the second pod"
    assert pods.ended_of("gpu-0", second) == {"0:gpu-0"}
    assert pods.ended_of(second) == set()
    pods.run(SECOND, THIRD)
    pods.ended_of(second, "gpu-2")
    assert pods.ended_of(second, "gpu-2") == set(), "both run"


def test_no_device_of_a_running_pod_counts_as_free_whatever_pods_had_its_name() -> None:
    """Any number of pods of one name start and end between two responses."""
    for seed in range(2000):
        random = Random(seed)  # noqa: S311  # a history, no secret
        pods, running, listed = Pods(), dict[str, str](), dict[str, str]()
        pods.others = {FIRST}
        for number in range(20):
            step = random.choice(["start", "end", "unlist", "respond"])
            free = sorted({"gpu-0", "gpu-1", "gpu-2"} - set(running.values()))
            former = sorted(listed.keys() - running.keys())
            if step == "start" and free:
                uid = f"{number:08}{FIRST[8:]}"
                running[uid] = listed[uid] = random.choice(free)
            elif step == "end" and running:
                del running[random.choice(sorted(running))]
            elif step == "unlist" and former:
                del listed[random.choice(former)]
            pods.run(*running)
            if step == "respond":
                devices = random.sample(sorted(listed.values()), len(listed))
                ended = {int(one.partition(":")[0]) for one in pods.ended_of(*devices)}
                kept = [device for at, device in enumerate(devices) if at not in ended]
                assert not Counter(running.values()) - Counter(kept), seed


def test_two_pods_of_a_name_that_were_never_seen_alone_count_as_running() -> None:
    pods = Pods()
    pods.folders = [f"research_job_{FIRST}"]
    pods.run(SECOND)
    assert pods.ended_of("gpu-0", "gpu-1") == set()


@pytest.mark.parametrize(
    "lists",
    [
        [["gpu-0"], ["", "gpu-0"]],
        [["gpu-0"], ["gpu-0", "gpu-0"], ["", "gpu-0"]],
        [["gpu-0"], ["gpu-0", ""]],
    ],
)
def test_a_running_pod_may_have_the_devices_of_a_former_pod(lists: list[list[str]]) -> None:
    """The kubelet may list the former pod without devices, so nobody knows whose these are."""
    first, *others = lists
    pods = Pods()
    pods.run(FIRST)
    pods.ended_of(*first)
    pods.run(SECOND)
    for devices in others[:-1]:
        pods.ended_of(*devices)
        pods.ended_of(*devices)
    assert pods.ended_of(*others[-1]) == set()
    assert pods.ended_of(*others[-1]) == set()


def test_no_listed_pod_has_ended_while_cgroups_are_not_visible() -> None:
    pods = Pods()
    pods.run(FIRST)
    pods.ended_of("gpu-0")
    pods.run(SECOND)
    pods.ended_of("gpu-0", "gpu-1")
    pods.run()
    assert pods.ended_of("gpu-0", "gpu-1") == set()
