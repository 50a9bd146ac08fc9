"""Names of containers from the names of their logs."""

from collections.abc import Iterable
from pathlib import Path

from gpuledger_agent.host.node_pods import MAX_NAMES, ContainerName, ContainerNames, list_folder
from gpuledger_simulator.clock import ManualClock
from tests.held_objects import is_bounded

CHAT_ID, OTHER_ID = "a" * 64, "b" * 64
CHAT = f"chat-7c9d-x2_serving_vllm-server-{CHAT_ID}.log"


class Folder:
    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.looks = 0

    def __call__(self) -> Iterable[str]:
        self.looks += 1
        return list(self.names)


def test_a_log_names_pod_namespace_and_container() -> None:
    names = ContainerNames(list_names=Folder(CHAT), clock=ManualClock(start_ns=0))

    assert names.name_of(CHAT_ID) == ContainerName(
        namespace="serving", pod="chat-7c9d-x2", container="vllm-server"
    )


def test_what_is_no_log_of_a_container_names_nobody() -> None:
    strange = (
        *("", "x.log", f"a_b-{OTHER_ID}.log", f"a_b_c-{OTHER_ID[:63]}.log", f"{CHAT}.1"),
        # As a file's name reads whose bytes are not UTF-8; it cannot be written anywhere.
        *(f"\udcff_b_c-{OTHER_ID}.log", f"a_\udcff_c-{OTHER_ID}.log", f"a_b_\n-{OTHER_ID}.log"),
    )
    names = ContainerNames(list_names=Folder(*strange), clock=ManualClock(start_ns=0))

    assert names.name_of(OTHER_ID) is None
    assert names.name_of(CHAT_ID) is None


def test_the_folder_is_read_again_for_an_unknown_container_once_a_second_at_most() -> None:
    clock, folder = ManualClock(start_ns=0), Folder()
    names = ContainerNames(list_names=folder, clock=clock)
    assert names.name_of(CHAT_ID) is None
    folder.names.append(CHAT)
    assert names.name_of(CHAT_ID) is None
    assert names.name_of(OTHER_ID) is None
    assert folder.looks == 1
    clock.advance(1)
    assert names.name_of(CHAT_ID)
    assert folder.looks == 2


def test_a_container_that_is_never_found_is_looked_for_ever_more_seldom() -> None:
    clock, folder = ManualClock(start_ns=0), Folder(CHAT)
    names = ContainerNames(list_names=folder, clock=clock)
    for _ in range(600):
        names.name_of(OTHER_ID)
        clock.advance(1)

    assert folder.looks < 20


def test_a_container_whose_log_is_gone_is_forgotten_when_the_folder_is_read_again() -> None:
    clock, folder = ManualClock(start_ns=0), Folder(CHAT)
    names = ContainerNames(list_names=folder, clock=clock)
    assert names.name_of(CHAT_ID)
    folder.names.clear()
    clock.advance(1)
    assert names.name_of(OTHER_ID) is None
    assert names.name_of(CHAT_ID) is None


def test_names_are_bounded_in_number() -> None:
    folder = Folder(*(f"p_n_c-{number:064x}.log" for number in range(MAX_NAMES + 10)))
    names = ContainerNames(list_names=folder, clock=ManualClock(start_ns=0))
    for number in range(MAX_NAMES):
        names.name_of(f"{number:064x}")

    assert is_bounded(
        names, lambda number: names.name_of(f"{MAX_NAMES + number:064x}"), times=2 * MAX_NAMES
    )


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    (tmp_path / CHAT).touch()

    assert list(list_folder(tmp_path)()) == [CHAT]
    assert list(list_folder(tmp_path / "none")()) == []
