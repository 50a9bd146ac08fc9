"""Whether `/proc` is the host's."""

from typing import Literal

import pytest

from gpuledger_agent.host.procfs import check_procfs, shows_kernel_threads

MACHINE = b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 25 0 0\n"
PROGRAM = b"2 (kthreadd) S 0 2 2 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 911 0 0\n"
WORKER = b"2 (a b) (c)) S 1 2 2 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 911 0 0\n"


class Files:
    def __init__(self, second: bytes | None) -> None:
        self.second = second

    def read(self, path: str) -> bytes:
        if path != "/proc/2/stat" or self.second is None:
            raise FileNotFoundError(path)
        return self.second


@pytest.mark.parametrize(
    ("second", "is_the_machines"),
    [
        (MACHINE, True),
        (PROGRAM, False),
        (WORKER, False),
        (None, False),
        (b"", False),
        (b"2 (", False),
    ],
    ids=["machine", "a program of that name", "a program", "hidden", "empty", "cut"],
)
def test_only_the_hosts_proc_shows_the_kernels_threads(
    second: bytes | None, *, is_the_machines: bool
) -> None:
    assert shows_kernel_threads(Files(second)) == is_the_machines
    assert check_procfs(Files(second)).is_on == is_the_machines


@pytest.mark.parametrize("second", [MACHINE, PROGRAM, None])
@pytest.mark.parametrize("wanted", [True, False])
def test_an_explicit_setting_decides(second: bytes | None, *, wanted: bool) -> None:
    assert check_procfs(Files(second), wanted=wanted).is_on is wanted


@pytest.mark.parametrize("wanted", ["auto"])
def test_the_reason_names_the_remedy(wanted: Literal["auto"]) -> None:
    detail = check_procfs(Files(PROGRAM), wanted=wanted).detail

    assert "hostPID: true" in detail
    assert "attribution: true" in detail
