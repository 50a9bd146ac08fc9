"""Incidents are counted exactly, despite repetitions and kills."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.codec import decoder_of, encode, validate
from gpuledger.keys import node_key
from gpuledger.ledger.families import INCIDENTS, XID_ERRORS, Family
from gpuledger.ledger.health import COUNTED_KINDS, OTHER
from gpuledger.ledger.series import EventSeries, SeriesGroup
from gpuledger.records import Incident, NodeCounters
from gpuledger.records.counters import MAX_KNOWN_INCIDENTS
from gpuledger.xids import all_xids
from gpuledger_sinks.remote_write.node_incidents import SENT_NS, IncidentsOfNode
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples, NodeIntervals
from tests.unit.sinks.builders import GPU, SECOND_NS, START_NS, event
from tests.unit.sinks.remote_write.happened import incident

INTERVAL_NS = 5 * SECOND_NS
OTHER_GPU = "GPU-2"


class StrictReceiver:
    """Accepts the samples of a node from one sink after another, as a strict Prometheus does.

    A request has the samples of one time, and is accepted whole or not at all.
    """

    def __init__(self) -> None:
        self.stored: dict[SeriesGroup, list[tuple[int, float]]] = {}

    def take(self, samples: IntervalSamples) -> None:
        taken = {group: list(self.stored.get(group, [])) for group in samples.values}
        for group, (value,) in samples.values.items():
            assert value is not None
            found = taken[group]
            time_ms = samples.time_ns // 10**6
            if found and (time_ms, value) == found[-1]:
                continue
            if found and time_ms <= found[-1][0]:
                return
            found.append((time_ms, value))
        self.stored |= taken

    def increases(self) -> dict[tuple[Family, tuple[str, ...]], float]:
        """Return by how much each series has grown, as `increase` would sum it."""
        for values in self.stored.values():
            reported = [value for _, value in values]
            assert reported == sorted(reported), "a counter has fallen"
        return {
            (group.family, tuple(group.label_values)): values[-1][1] - values[0][1]
            for group, values in self.stored.items()
            if values[-1][1]
        }


class Played:
    """A node whose ticks and incidents are counted by sinks that may be killed."""

    def __init__(self, incidents: Sequence[Incident], *, interval_ns: int) -> None:
        self._incidents, self._interval_ns = incidents, interval_ns
        self.receiver = StrictReceiver()
        self._ticks = self._read_ticks = self._read_incidents = 0
        self._committed: tuple[NodeCounters | None, int, int] = (None, 0, 0)
        self._restart()

    def _restart(self) -> None:
        counted, self._read_ticks, self._read_incidents = self._committed
        self._node = NodeIntervals(
            node_key(event()), values=EventSeries(), interval_ns=self._interval_ns, counted=counted
        )

    def tick(self, seconds: int) -> None:
        """Let time pass, and process and send all available ticks."""
        self._ticks += seconds
        for number in range(self._read_ticks, self._ticks):
            one = event(number)
            if one.seq > self._node.boots.get(one.boot_id, -1):
                record = Record("events", 0, number, 0, None, None)
                self._send(self._node.add(one, record, is_past=False))
        self._read_ticks = self._ticks

    def count(self, repeated: int) -> None:
        """Read the next incident, and then repeat some of those before it."""
        end = min(self._read_incidents + 1, len(self._incidents))
        again = self._incidents[max(0, end - repeated) : end]
        for one in [*self._incidents[self._read_incidents : end], *again]:
            self._node.count_incident(one)
        self._read_incidents = end
        self.commit()

    def commit(self) -> None:
        first = self._node.first_offset
        record = self._node.take_record("group")
        validate(record)
        decoded = decoder_of("counters", NodeCounters).decode(encode(record))
        offset = self._read_ticks if first is None else first
        self._committed = (decoded, offset, self._read_incidents)

    def kill(self) -> None:
        self._restart()

    def finish(self) -> None:
        while self._read_incidents < len(self._incidents):
            self.count(0)
        self.tick(30)
        self._send(self._node.close())

    def _send(self, samples: Iterable[IntervalSamples]) -> None:
        for one in samples:
            if one.is_of_incidents:
                self.receiver.take(one)


def truth(incidents: Iterable[Incident]) -> Mapping[tuple[Family, tuple[str, ...]], int]:
    known = {str(xid.code) for xid in all_xids()}
    found: Counter[tuple[Family, tuple[str, ...]]] = Counter()
    for one in incidents:
        kind = one.kind if one.kind in COUNTED_KINDS else OTHER
        found[INCIDENTS, (one.gpu_uuid, kind)] += 1
        if one.xid is not None:
            xid = str(one.xid) if str(one.xid) in known else OTHER
            found[XID_ERRORS, (one.gpu_uuid, xid)] += 1
    return found


HAPPENED = st.builds(
    incident,
    number=st.integers(0, 10**5),
    kind=st.sampled_from(["xid", "xid", "ecc_uncorrected", "gpu_lost", "of_another_version"]),
    xid=st.sampled_from([31, 79, 9_999]),
    gpu_uuid=st.sampled_from([GPU, OTHER_GPU]),
)
STEP = st.one_of(
    st.tuples(st.just("tick"), st.integers(1, 12)),
    st.tuples(st.just("count"), st.integers(0, 3)),
    st.tuples(st.just("commit"), st.just(0)),
    st.tuples(st.just("kill"), st.just(0)),
)


@given(
    incidents=st.lists(HAPPENED, max_size=8, unique_by=repr),
    steps=st.lists(STEP, max_size=24),
    interval_ns=st.sampled_from([0, INTERVAL_NS]),
)
def test_counters_grow_by_the_number_of_incidents_and_never_fall_whenever_sinks_are_killed(
    incidents: list[Incident], steps: list[tuple[str, int]], interval_ns: int
) -> None:
    played = Played(incidents, interval_ns=interval_ns)
    for what, amount in steps:
        if what == "tick":
            played.tick(amount)
        elif what == "count":
            played.count(amount)
        elif what == "commit":
            played.commit()
        else:
            played.kill()
    played.finish()
    assert played.receiver.increases() == truth(incidents)


def values_at(
    node: IncidentsOfNode, seconds: int, *, gpus: Sequence[str] = (GPU,)
) -> dict[tuple[str, ...], float] | None:
    """Return the samples at this number of seconds after the start, by labels."""
    time_ns = START_NS + seconds * SECOND_NS
    samples = node.samples(gpus, time_ns=time_ns, interval_ns=INTERVAL_NS)
    if samples is None:
        return None
    return {tuple(group.label_values): value or 0 for group, (value,) in samples.values.items()}


def node_of(counted: NodeCounters | None = None) -> IncidentsOfNode:
    return IncidentsOfNode(every_ns=10 * SECOND_NS, counted=counted)


def test_each_kind_of_a_gpu_starts_at_0_and_an_xid_appears_with_its_first_incident() -> None:
    node = node_of()
    assert values_at(node, 0) is None
    assert values_at(node, 10) == {(GPU, kind): 0 for kind in COUNTED_KINDS}


def test_an_incident_is_sent_with_the_next_interval() -> None:
    node = node_of()
    values_at(node, 0)
    node.add(incident(xid=48), time_ns=START_NS)
    reported = values_at(node, 5) or {}
    assert {labels: value for labels, value in reported.items() if value} == {
        (GPU, "xid"): 1,
        (GPU, "48"): 1,
    }


@pytest.mark.parametrize("first", [0, 12], ids=["in its first sample", "after zeros were sent"])
def test_a_series_has_a_0_before_its_first_value(first: int) -> None:
    node = node_of()
    values_at(node, 0)
    if first:
        assert values_at(node, first)
    node.add(incident(xid=48), time_ns=START_NS)
    time_ns = START_NS + (first + 5) * SECOND_NS
    samples = node.samples([GPU], time_ns=time_ns, interval_ns=INTERVAL_NS)
    assert samples is not None
    of_xid, of_kind = SeriesGroup(XID_ERRORS, (GPU, "48")), SeriesGroup(INCIDENTS, (GPU, "xid"))
    assert set(samples.begun) == ({of_xid} if first else {of_xid, of_kind})
    (start_ms,) = samples.starts_ms[of_xid]
    assert start_ms == (time_ns - INTERVAL_NS) // 10**6 + 1


def test_a_gpu_that_is_in_no_tick_is_sent_for_a_while_after_its_last_incident() -> None:
    node = node_of()
    node.add(incident(gpu_uuid="PCI:0000:1b:00"), time_ns=START_NS)
    kept = SENT_NS // SECOND_NS
    for seconds, is_reported in ((5, True), (kept, True), (kept + 10, False)):
        reported = values_at(node, seconds, gpus=[GPU]) or {}
        assert (("PCI:0000:1b:00", "79") in reported) == is_reported
    node.add(incident(1, gpu_uuid="PCI:0000:1b:00"), time_ns=START_NS + kept * SECOND_NS)
    assert (values_at(node, kept + 20, gpus=[GPU]) or {})["PCI:0000:1b:00", "79"] == 2


def test_an_incident_is_recognized_while_it_is_one_of_the_last() -> None:
    node = node_of()
    happened = [incident(number) for number in range(MAX_KNOWN_INCIDENTS + 1)]
    assert all(node.add(one, time_ns=START_NS) for one in happened)
    assert not any(node.add(one, time_ns=START_NS) for one in happened[1:])
    assert len(node.hashes()) == MAX_KNOWN_INCIDENTS
