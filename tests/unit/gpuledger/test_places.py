"""docs/reference/topics.md lists the positions of array records, in their order."""

from pathlib import Path

import pytest

from gpuledger.records import Entry, EventAllocation, EventContainer, GpuReading
from gpuledger.records.base import ArrayRecord

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "topics.md").read_text()


@pytest.mark.parametrize("record", [Entry, EventContainer, EventAllocation, GpuReading])
def test_the_page_lists_the_positions_of_arrays_in_their_order(record: type[ArrayRecord]) -> None:
    section = PAGE.partition(f"#### {record.__name__}\n")[2].partition("\n####")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("|")]

    assert [(int(position), field.strip()) for position, field in rows[2:]] == [
        (position, f"`{field}`") for position, field in enumerate(record.__struct_fields__)
    ]
