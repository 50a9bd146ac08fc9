"""The page's part of readings under our own names, in base units: `own.csv` beside this module."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from agent.exposition.devices import Read, ShownDevice, read_at
from agent.exposition.node_state import Snapshot
from agent.exposition.settings import Profile
from agent.exposition.text import SampleLine, write_family, write_labels

FILE: Final = Path(__file__).with_name("own.csv")
LABELS: Final = ("gpu_uuid", "gpu_index", "model")


class OwnFamily(NamedTuple):
    """A family of readings of devices."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    meaning: str
    """Its help text."""
    members: Sequence[tuple[str, Read]]
    """Further labels, written, with what reads the value."""
    label_names: tuple[str, ...]
    """Names of the further labels."""
    profile: Profile
    """The least profile that shows it."""

    def is_in(self, profile: Profile) -> bool:
        """Return whether a profile shows the family."""
        return profile in ("full", self.profile)


@cache
def own_families() -> tuple[OwnFamily, ...]:
    """Return the families of devices in their order."""
    found: dict[str, OwnFamily] = {}
    with FILE.open(newline="") as lines:
        for name, kind, meaning, path, further, profile in csv.reader(
            line for line in lines if not line.startswith("#")
        ):
            labels = [tuple(pair.split("=", 1)) for pair in further.split(",") if pair]
            family = found.setdefault(
                name,
                OwnFamily(name, kind, meaning, [], tuple(pair[0] for pair in labels), profile),  # type: ignore[arg-type]  # a test holds the file to the profiles
            )
            written = write_labels([(pair[0], pair[1]) for pair in labels])
            family.members.append(("," + written if written else "", read_at(path)))  # type: ignore[attr-defined]  # a list while it is built
    return tuple(found.values())


def write_own(now: Snapshot, profile: Profile) -> Iterator[str]:
    """Yield the lines of the families that a profile shows."""
    written = [(one, write_labels(device_labels(one, now.sample.node))) for one in now.devices]
    for family in own_families():
        if not family.is_in(profile):
            continue
        samples = _samples(family, written)
        yield from write_family(family.name, family.kind, family.meaning, samples)


def device_labels(device: ShownDevice, node: str) -> list[tuple[str, str]]:
    """Return the labels of a device's readings; those that the remote-write sink sends as well."""
    reading, facts = device.reading, device.facts
    model = reading.model or (facts and facts.model) or ""
    values = (reading.uuid, str(reading.index), model)
    return [("node", node), *zip(LABELS, values, strict=True)]


def _samples(family: OwnFamily, written: Iterable[tuple[ShownDevice, str]]) -> Iterator[SampleLine]:
    for device, labels in written:
        for further, read in family.members:
            value = read(device)
            if value is not None and not isinstance(value, str):
                yield SampleLine(labels + further, value)
