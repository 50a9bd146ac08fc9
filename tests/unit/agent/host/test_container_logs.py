"""Names of containers from the names of their log files."""

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
        self.reads = 0

    def __call__(self) -> Iterable[str]:
        self.reads += 1
        return list(self.names)


def test_the_name_of_a_log_has_pod_namespace_and_container() -> None:
    names = ContainerNames(list_names=Folder(CHAT), clock=ManualClock(start_ns=0))

    assert names.name_of(CHAT_ID) == ContainerName(
        namespace="serving", pod="chat-7c9d-x2", container="vllm-server"
    )


def test_other_file_names_identify_no_container() -> None:
    strange = (
        *("", "x.log", f"a_b-{OTHER_ID}.log", f"a_b_c-{OTHER_ID[:63]}.log", f"{CHAT}.1"),
        # A file name that is not UTF-8 is read like this; it cannot be written anywhere.
        *(f"\udcff_b_c-{OTHER_ID}.log", f"a_\udcff_c-{OTHER_ID}.log", f"a_b_\n-{OTHER_ID}.log"),
    )
    names = ContainerNames(list_names=Folder(*strange), clock=ManualClock(start_ns=0))

    assert names.name_of(OTHER_ID) is None
    assert names.name_of(CHAT_ID) is None


def test_for_an_unknown_container_the_directory_is_read_at_most_once_a_second() -> None:
    clock, folder = ManualClock(start_ns=0), Folder()
    names = ContainerNames(list_names=folder, clock=clock)
    assert names.name_of(CHAT_ID) is None
    folder.names.append(CHAT)
    assert names.name_of(CHAT_ID) is None
    assert names.name_of(OTHER_ID) is None
    assert folder.reads == 1
    clock.advance(1)
    assert names.name_of(CHAT_ID)
    assert folder.reads == 2


def test_a_container_that_is_never_found_is_looked_up_less_and_less_often() -> None:
    clock, folder = ManualClock(start_ns=0), Folder(CHAT)
    names = ContainerNames(list_names=folder, clock=clock)
    for _ in range(600):
        names.name_of(OTHER_ID)
        clock.advance(1)

    assert folder.reads < 20


def test_a_container_is_forgotten_at_the_next_read_if_its_log_was_deleted() -> None:
    clock, folder = ManualClock(start_ns=0), Folder(CHAT)
    names = ContainerNames(list_names=folder, clock=clock)
    assert names.name_of(CHAT_ID)
    folder.names.clear()
    clock.advance(1)
    assert names.name_of(OTHER_ID) is None
    assert names.name_of(CHAT_ID) is None


def test_the_number_of_names_is_bounded() -> None:
    folder = Folder(*(f"p_n_c-{number:064x}.log" for number in range(MAX_NAMES + 10)))
    names = ContainerNames(list_names=folder, clock=ManualClock(start_ns=0))
    for number in range(MAX_NAMES):
        names.name_of(f"{number:064x}")

    assert is_bounded(
        names, lambda number: names.name_of(f"{MAX_NAMES + number:064x}"), times=2 * MAX_NAMES
    )


def test_a_missing_directory_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / CHAT).touch()

    assert list(list_folder(tmp_path)()) == [CHAT]
    assert list(list_folder(tmp_path / "none")()) == []
