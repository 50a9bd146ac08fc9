"""Container and pod of a cgroup path: real paths of many runtimes, and the rules."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuledger_agent.core.processes.table import Location
from gpuledger_agent.host.cgroup import UNRECOGNIZED, find_node_paths, locate
from gpuledger_agent.host.procfs import ProcessReader
from tests.tables import for_each

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parents[4] / "tests" / "data" / "cgroup-vectors.jsonl")
    .read_text()
    .splitlines()
]
UID = "9953f715-6c55-3eb2-99f1-cc88e6816fce"
POD = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
OUTER, INNER = "a" * 64, "b" * 64


@for_each("vector", VECTORS)
def test_every_known_form_gives_its_container_pod_and_job(vector: dict[str, Any]) -> None:
    found = locate(vector["line"])
    assert (found.container_id, found.pod_uid) == (vector["container_id"], vector["pod_uid"])
    assert found.job_id == vector.get("job_id")
    assert found.line == vector["line"]


def test_all_example_paths_are_present() -> None:
    assert len(VECTORS) >= 52


@pytest.mark.parametrize(
    ("law", "path", "container_id", "pod_uid"),
    [
        ("Docker in a pod is the pod's container", f"/{POD}/{OUTER}/docker/{INNER}", OUTER, UID),
        ("a pod in a container is the inner pod", f"/docker/{OUTER}/{POD}/{INNER}", INNER, UID),
        ("the outermost pod wins", f"/pod{'1' * 32}/{OUTER}/{POD}/{INNER}", OUTER, "1" * 32),
        ("an outer container is not the pod's", f"/docker/{OUTER}/{POD}", None, UID),
        ("the first of nested containers", f"/docker/{OUTER}/docker/{INNER}", OUTER, None),
        ("nerdctl", f"/system.slice/nerdctl-{OUTER}.scope", OUTER, None),
        ("a mount is not a container", f"/system.slice/{OUTER}.mount", None, None),
        ("a Podman pod is not a pod", f"/machine.slice/libpod_pod_{OUTER}.slice", None, None),
        ("65 digits are not an id", f"/docker/{OUTER}a", None, None),
        ("capital digits are not an id", f"/docker/{OUTER.upper()}", None, None),
        ("a removed cgroup", f"/{POD}/cri-containerd-{OUTER}.scope (deleted)", OUTER, UID),
        ("CRI-O in colon form", f"/system.slice/{POD}:crio:{OUTER}", OUTER, UID),
    ],
)
def test_a_path_is_parsed_by_whole_segments(
    law: str, path: str, container_id: str | None, pod_uid: str | None
) -> None:
    found = locate(f"0::{path}")
    assert (found.container_id, found.pod_uid) == (container_id, pod_uid), law


SLURM_V1, SLURM_V2 = "/slurm/uid_1000/job_7/step_0", "/system.slice/slurmstepd.scope/job_7"
USERS = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    ("law", "path", "job_id"),
    [
        ("a user's own directory is not a job", f"{USERS}/slurm/uid_0/job_8/step_0", None),
        ("nor is a user's scope", f"{USERS}/slurmstepd.scope/job_8", None),
        ("nor a slice in a user's", f"{USERS}{SLURM_V2}", None),
        ("nor one in another's service", f"/system.slice/ssh.service{SLURM_V2}", None),
        ("nor one in a job", f"{SLURM_V2}/step_0/user/task_0/job_8", "7"),
        ("nor a whole tree in a job", f"{SLURM_V1}/slurm/uid_1000/job_8", "7"),
        ("the scope is a segment as a whole", "/system.slice/slurmstepd.scopes/job_8", None),
        ("and so is the root", "/slurms/uid_1000/job_8", None),
        ("a job belongs to a user", "/slurm/job_8", None),
        ("a job has a number", "/slurm/uid_1000/job_8x", None),
        ("in ASCII digits", "/slurm/uid_1000/job_\u0668", None),
        ("and only a few digits", f"/slurm/uid_1000/job_{'8' * 21}", None),
        ("a container's job is not the node's", f"/docker/{OUTER}{SLURM_V2}", None),
        ("a removed cgroup", f"{SLURM_V2} (deleted)", "7"),
    ],
)
def test_a_job_is_identified_only_by_slurms_own_cgroup(
    law: str, path: str, job_id: str | None
) -> None:
    assert locate(f"0::{path}").job_id == job_id, law


SCOPE = "/system.slice/slurmstepd.scope"
PODS = "kubepods.slice"


@pytest.mark.parametrize(
    ("law", "path", "name"),
    [
        ("a job of an unknown form", f"{SCOPE}/j8/step_0/user", "slurmstepd.scope/j8"),
        ("each job has its own name", f"{SCOPE}/j9/step_0", "slurmstepd.scope/j9"),
        ("each node, too", "/system.slice/a_slurmstepd.scope/j8", "a_slurmstepd.scope/j8"),
        ("a longer SLUID", f"{SCOPE}/s4M8TQ2XVB9C01A/step_0", "slurmstepd.scope/s4M8TQ2XVB9C01A"),
        ("Slurm's own processes are the host's", f"{SCOPE}/system/processes", None),
        ("and so is its daemon", SCOPE, None),
        ("a user's own scope is not Slurm's", f"{USERS}/slurmstepd.scope/j8", None),
        ("a pod's cgroup", f"/{PODS}/kubepods-w.slice/a", f"{PODS}/kubepods-w.slice"),
        ("in a class", f"/{PODS}/kubepods-besteffort.slice/w.slice", f"{PODS}/w.slice"),
        ("of cgroupfs", "/kubepods/burstable/workload/main", "kubepods/workload"),
        ("below a root of the kubelet's", f"/kubelet.slice/kubelet-{PODS}/w", f"kubelet-{PODS}/w"),
        ("in a node that is a container", f"/docker/x/kubepods/w/{OUTER}x", "kubepods/w"),
        ("the class itself", "/kubepods/burstable", "kubepods/burstable"),
        ("all pods", f"/{PODS}", PODS),
        ("another cgroup of that name", "/system.slice/kubepods-exporter.service", None),
    ],
)
def test_a_cgroup_of_slurm_or_the_kubelet_of_no_known_form_has_a_job_id_of_its_own(
    law: str, path: str, name: str | None
) -> None:
    found = locate(f"0::{path}")
    assert found.job_id == (name and UNRECOGNIZED + name), law
    assert found.is_of_host == (name is None)
    known = f"1:name=systemd:/docker/{OUTER}"
    assert locate(f"0::{path}\n{known}\n") == Location(container_id=OUTER, line=known)


@pytest.mark.parametrize("slurm", [SLURM_V1, SLURM_V2])
def test_slurm_in_a_pod_and_a_pod_in_a_job_belong_to_the_pod(slurm: str) -> None:
    pod = f"/{POD}/cri-containerd-{OUTER}.scope"
    for path in (f"{pod}{slurm}", f"{slurm}{pod}"):
        found = locate(f"0::{path}")
        assert (found.pod_uid, found.container_id, found.job_id) == (UID, OUTER, None)


def test_a_line_with_a_pod_wins_and_otherwise_a_line_with_a_job() -> None:
    container, job = f"1:name=systemd:/docker/{OUTER}", f"9:devices:{SLURM_V1}"
    assert locate(f"{container}\n{job}\n") == Location(job_id="7", line=job)
    assert locate(f"{container}\n{job}\n3:pids:/{POD}\n").job_id is None


def test_a_node_that_runs_in_a_pod_has_its_own_jobs() -> None:
    agent = f"0::{NODES_POD}/kubelet/pod{'4' * 32}/{'d' * 64}\n"
    node_paths = find_node_paths(agent)
    assert locate(f"0::{NODES_POD}{SLURM_V2}\n", node_paths=node_paths).job_id == "7"
    assert locate(f"0::{NODES_POD}\n", node_paths=node_paths).is_of_host
    # Paths outside the node belong to another machine, or to its own container.
    assert locate(f"0::{SLURM_V2}\n", node_paths=node_paths).job_id is None


@pytest.mark.parametrize(
    ("law", "first", "path", "job_id"),
    [
        ("a job of cgroup version 2", "/../../../init.scope", f"/../../..{SLURM_V2}", "7"),
        ("a job of cgroup version 1", "/../../..", f"/../../..{SLURM_V1}", "7"),
        ("next to a Docker in its slice", "/../../init.scope", "/../slurmstepd.scope/job_7", "7"),
        ("not one further below", "/../../../init.scope", f"/..{SLURM_V2}", None),
        ("nor one in the agent's own cgroup", "/../../../init.scope", SLURM_V2, None),
        ("nor a user's", "/../../../init.scope", f"/../../..{USERS}{SLURM_V2}", None),
        ("nor next to the agent", "/..", "/slurmstepd.scope/job_7", None),
        ("without a namespace", "/init.scope", SLURM_V2, "7"),
    ],
)
def test_an_agent_in_its_own_cgroup_namespace_sees_the_nodes_jobs(
    law: str, first: str, path: str, job_id: str | None
) -> None:
    node_paths = find_node_paths("0::/\n", f"0::{first}\n")
    assert locate(f"0::{path}\n", node_paths=node_paths).job_id == job_id, law


@pytest.mark.parametrize(
    ("law", "path", "name"),
    [
        ("another pod's cgroup", "/../../workload.slice/main", "kubepods/workload.slice"),
        ("in another class", "/../../../kubepods-besteffort.slice/w/x", "kubepods/w"),
        ("the class itself", "/../..", "kubepods"),
        ("a process of the node", "/../../../../system.slice/dcgm.service", None),
        ("the agent's own", "/", None),
        ("a relative path", "workload", None),
    ],
)
def test_an_agent_in_a_pods_cgroup_namespace_recognizes_what_is_below_kubepods(
    law: str, path: str, name: str | None
) -> None:
    node_paths = find_node_paths("0::/\n", "0::/../../../../init.scope\n")
    found = locate(f"0::{path}\n", node_paths=node_paths, is_in_pod=True)
    assert found.job_id == (name and UNRECOGNIZED + name), law
    pod = f"0::/../../{POD}/cri-containerd-{OUTER}.scope\n"
    known = locate(pod, node_paths=node_paths, is_in_pod=True)
    assert (known.pod_uid, known.container_id, known.job_id) == (UID, OUTER, None)


class _Files:
    """A `/proc` with only these files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def read(self, path: str) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]


@pytest.mark.parametrize("root", ["/proc/1/cgroup", "/proc/2/cgroup"])
def test_any_process_at_the_nodes_root_reveals_the_root(root: str) -> None:
    stat = b"77 (train) S 1 " + b"0 " * 17 + b"900 0"
    files = {
        "/proc/self/cgroup": b"0::/\n",
        root: b"0::/../../..\n",
        "/proc/77/stat": stat,
        "/proc/77/cgroup": f"0::/../../..{SLURM_V2}/step_0\n".encode(),
    }
    assert ProcessReader(_Files(files)).read(77).location.job_id == "7"


def test_in_a_hybrid_file_the_line_with_the_pod_wins() -> None:
    pod = f"0::/docker/{OUTER}/kubelet.slice/{POD}/cri-containerd-{INNER}.scope"
    found = locate(f"12:memory:/docker/{OUTER}\n1:name=systemd:/docker/{OUTER}\n{pod}\n")
    assert found == Location(container_id=INNER, pod_uid=UID, line=pod)


@pytest.mark.parametrize("separator", ["\r", "\v", "\f", "\x1c", "\x85", "\u2028"])
def test_the_name_of_a_cgroup_cannot_start_a_new_line(separator: str) -> None:
    # A process may create cgroups below its own, with any name without a slash or a newline.
    forged = f"0::/{POD}/{INNER}"  # its container would win over a line without one
    assert locate(f"0::/pod{'1' * 32}/x{separator}{forged}\n").pod_uid == "1" * 32


NODES_POD = f"/kubepods/besteffort/pod{'2' * 32}/{'c' * 64}"
"""The prefix of a node's own paths if it is a container in a pod."""


@pytest.mark.parametrize(
    ("law", "own", "path", "container_id", "pod_uid"),
    [
        ("its pod is found", "/kubelet", f"/kubelet/{POD}/{INNER}", INNER, UID),
        ("in any slice", "/kubelet", f"/system.slice/{POD}/{INNER}", INNER, UID),
        ("a pod in it", "", f"/{POD}/{INNER}/pod{'3' * 32}/{OUTER}", INNER, UID),
        ("its own processes are the host's", "", "/system.slice/kubelet.service", None, None),
    ],
)
def test_a_node_that_runs_in_a_pod_has_its_own_pods(
    law: str, own: str, path: str, container_id: str | None, pod_uid: str | None
) -> None:
    agent = f"0::{NODES_POD}{own}/pod{'4' * 32}/{'d' * 64}\n"
    found = locate(f"0::{NODES_POD}{path}\n", node_paths=find_node_paths(agent))
    assert (found.container_id, found.pod_uid) == (container_id, pod_uid), law


def test_paths_outside_such_a_node_are_parsed_completely() -> None:
    agent = f"0::{NODES_POD}/pod{'4' * 32}/{'d' * 64}\n"
    found = locate(f"0::/{POD}/{INNER}\n", node_paths=find_node_paths(agent))
    assert (found.container_id, found.pod_uid) == (INNER, UID)


@pytest.mark.parametrize(
    "agent", ["0::/\n", f"0::/{POD}/{OUTER}\n", f"0::/docker/{OUTER}/{POD}/{INNER}\n", ""]
)
def test_a_node_on_its_own_machine_has_no_path_prefix_to_remove(agent: str) -> None:
    assert find_node_paths(agent) == {}


def test_a_line_with_pod_and_container_wins_over_one_with_only_the_pod() -> None:
    lines = f"1:name=systemd:/{POD}\n7:freezer:/{POD}/{INNER}\n"
    assert locate(lines).container_id == INNER


def test_the_usual_controllers_win_among_equal_lines() -> None:
    lines = [f"9:blkio:/docker/{OUTER}", f"5:memory:/docker/{INNER}", f"6:pids:/docker/{OUTER}"]
    assert locate("\n".join(lines)).line == lines[1]


def test_a_host_process_is_reported_by_its_first_line() -> None:
    found = locate("3:cpu,cpuacct:/\n1:name=systemd:/user.slice\n")
    assert found == Location(line="3:cpu,cpuacct:/")
    assert found.is_of_host


def test_in_a_private_namespace_the_readers_own_container_is_not_visible() -> None:
    assert locate("0::/\n") == Location(line="0::/")


@pytest.mark.parametrize("text", ["", "\n\n", "   \n"])
def test_an_empty_file_has_no_location(text: str) -> None:
    assert locate(text) == Location()
