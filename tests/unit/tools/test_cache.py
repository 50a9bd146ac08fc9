"""The cache of built parts: its place, and that a directory in it is complete or absent."""

from pathlib import Path

import pytest

from tests.tools import cache


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"TESTS_TOOLS_CACHE": "/tools", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/ada"},
            "/tools/etcd-3",
        ),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/ada"}, "/xdg/gpuledger/tools/etcd-3"),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/gpuledger/tools/etcd-3"),
    ],
)
def test_the_cache_is_where_the_nearest_setting_puts_it(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TESTS_TOOLS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder_of("etcd", "3") == Path(expected)


def test_a_filled_directory_appears_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "etcd-3"
    with cache.filling(folder) as draft:
        (draft / "etcd").write_text("program")
        assert not folder.exists()
    assert (folder / "etcd").read_text() == "program"
    assert list(tmp_path.iterdir()) == [folder]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def build() -> None:
        with cache.filling(tmp_path / "etcd-3") as draft:
            (draft / "half").write_text("half a program")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    assert list(tmp_path.iterdir()) == []
