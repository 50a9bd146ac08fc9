"""What `make shape` counts."""

from pathlib import Path

from tests.shape import Shape, measure, read_sources, report

CODE = '''
class Twin:
    """Stands in two files."""

    def use(self) -> int:
        # It is used here alone.
        return self._helped() + self._shared() + self._shared()

    def _helped(self) -> int:
        return 1

    def _shared(self) -> int:  # noqa: X1  # as it is
        return 2
'''


def shape_of(folder: Path, files: dict[str, str]) -> Shape:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return measure(read_sources(folder, packages=["agent", "sinks"]))


def test_helpers_with_one_caller_private_functions_and_comments_are_counted(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, {"agent/a.py": CODE})
    assert shape.lines == 9
    assert shape.tiny_helpers_per_1000 * shape.lines == 1000
    assert shape.private_functions_per_1000 * shape.lines == 2000
    assert round(shape.comments_percent * shape.lines) == 100


def test_names_that_stand_for_two_things_are_found(tmp_path: Path) -> None:
    """A module's name counts within its package, a class's everywhere."""
    files = {"agent/one/read.py": CODE, "agent/two/read.py": "", "sinks/read.py": CODE}
    shape = shape_of(tmp_path, files)
    assert shape.repeated_classes == ["Twin"]
    assert shape.repeated_modules == ["agent: read"]
    assert shape.files == {"agent": 1, "sinks": 1}
    assert "classes: Twin" in report(shape)


def test_no_name_of_the_code_stands_for_two_things() -> None:
    shape = measure(read_sources(Path(__file__).parents[3]))
    assert (shape.repeated_classes, shape.repeated_modules) == ([], [])


MAX_FILES = 430
"""300 before delivery by intervals, counters and the state of alerts, 350 before drivers of all
forms and jobs, 365 before bills and the store of sums, which are forty, 400 before reports over
HTTP, which are fourteen, 414 before object stores, leases and what a store was at one time, which
are six, 420 before what confines a query, names pods, and tells times of a bill; what users are
given since may add its own files, and no more."""
MAX_AGENT_FILES = 91
"""84 before looks: they, a clock set back, the driver's windows and its accounts have a file
each."""


def test_the_code_stays_within_the_measures_of_its_shape() -> None:
    shape = measure(read_sources(Path(__file__).parents[3]))
    assert sum(shape.files.values()) <= MAX_FILES
    assert shape.files["agent"] <= MAX_AGENT_FILES
    assert shape.tiny_helpers_per_1000 <= 5
    assert shape.private_functions_per_1000 <= 20
    assert shape.comments_percent >= 3
