"""docs/events.md names the positions of array records, in their order."""

from pathlib import Path

from gpuledger.records import Entry, EventAllocation, EventContainer, GpuReading

PAGE = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
ARRAYS = {
    "`entries[]`": Entry,
    "`containers[]`": EventContainer,
    "`allocations[]`": EventAllocation,
    "`reading`": GpuReading,
}


def test_the_page_names_the_positions_of_arrays_in_their_order() -> None:
    between = PAGE.partition("<!-- places:begin -->\n")[2].partition("<!-- places:end -->")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in between.splitlines()]

    assert dict(rows[2:]) == {
        name: ", ".join(f"`{field}`" for field in record.__struct_fields__)
        for name, record in ARRAYS.items()
    }
