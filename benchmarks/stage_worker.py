"""A worker's state and work without its bus, as in its service, in a separate process.

The pods are read from bytes and then frozen for the garbage collector, as after a take-over. Ticks
come in polls, and markers are written with commits as large as the default settings allow. Only the
worker's CPU time counts, not the creation of ticks.
"""

import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.ticks import SEQ_PER_TICK, Fleet, node_name
from gpuledger.bus.protocol import Message, Record
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import encode
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.keys import key_in
from gpuledger.placement import placement_rule
from gpuledger.records import NamespaceRecord, NodeRecord, PodRecord
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.topics import partition_of_node
from gpuledger_enricher.join.join_settings import JoinTuning
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import DEAD_LETTERS, NAMESPACES, NODES, PODS, SAMPLES, TOPICS

_TUNING: Final = JoinTuning()
_TICKS: Final = _TUNING.records_per_commit


class StageWorker:
    """A handle on the worker's process."""

    def __init__(self, *, nodes: int, connection: Connection) -> None:
        self.nodes = nodes
        self._connection = connection

    def measure(self) -> float:
        """Let it process the ticks of one commit; return the microseconds per tick."""
        self._connection.send(_TICKS)
        microseconds: float = self._connection.recv()
        return microseconds


@contextmanager
def start_stage_worker(*, nodes: int) -> Iterator[StageWorker]:
    """Yield a worker that has its pods and has seen each node twice."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(nodes, theirs), daemon=True)
    process.start()
    try:
        ours.recv()
        yield StageWorker(nodes=nodes, connection=ours)
    finally:
        process.terminate()
        process.join()


def _serve(nodes: int, connection: Connection) -> None:
    work = _Work(nodes)
    work.do(2 * nodes)
    connection.send(None)
    while True:
        count = connection.recv()
        connection.send(work.do(count) * 1e6 / count)


class _NoReceiver:
    """The producer of a worker that rejects nothing."""

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        raise AssertionError(f"{messages} for {topic}-{partition}")


def _record(topic: str, partition: int, place: NodeRecord | NamespaceRecord) -> Record:
    return Record(topic, partition, 0, 0, key_in(place.cluster, place.name).encode(), encode(place))


class _Work:
    def __init__(self, nodes: int) -> None:
        fleet = Fleet(nodes=nodes)
        self._now_ns = fleet.tick(0, 0).time_ns
        self._dead_letters = DeadLetterQueue(
            consumer="bench", producer=_NoReceiver(), partitions=1, topic=DEAD_LETTERS
        )
        self._stage = JoinStage(
            dead_letters=self._dead_letters,
            is_placed=placement_rule(partitions=SAMPLES.partitions),
            time_ns=lambda: self._now_ns,
            topics=TOPICS,
        )
        self._places = [
            partition_of_node(
                key_in(DEFAULT_CLUSTER, node_name(node)), partitions=SAMPLES.partitions
            )
            for node in range(nodes)
        ]
        for node in range(nodes):
            self._stage.take_pods([self._pod(node, pod) for pod in fleet.pods(node)])
        namespace, described = fleet.places()
        self._stage.take_namespaces([_record(NAMESPACES.name, 0, namespace)])
        for place, one in zip(self._places, described, strict=True):
            self._stage.take_nodes([_record(NODES.name, place, one)])
        self._templates = [fleet.template(node) for node in range(nodes)]
        self._ticks = 0
        del fleet
        gc.collect()
        gc.freeze()  # as the service does once it has the pods

    def do(self, count: int) -> float:
        """Process the next ticks of all nodes in turn; return the CPU seconds."""
        spent_ns = events = 0
        for start in range(0, count, _TUNING.max_poll_records):
            polled = self._poll(min(_TUNING.max_poll_records, count - start))
            begun_ns = time.thread_time_ns()
            for records in polled.values():
                events += len(self._stage.take_samples(records))
            spent_ns += time.thread_time_ns() - begun_ns
        begun_ns = time.thread_time_ns()
        for partition in set(self._places):
            self._stage.drain_progress(partition)
        if events != count or self._dead_letters.rejected:
            raise AssertionError(f"{count} ticks made {events} events")
        return (spent_ns + time.thread_time_ns() - begun_ns) / NS_PER_SECOND

    def _poll(self, count: int) -> dict[int, list[Record]]:
        polled: dict[int, list[Record]] = {}
        for _ in range(count):
            record = self._next_tick()
            polled.setdefault(record.partition, []).append(record)
        return polled

    def _next_tick(self) -> Record:
        """Return the next tick; all nodes tick once per second, one after the other."""
        second, node = divmod(self._ticks, len(self._templates))
        self._ticks += 1
        template = self._templates[node]
        time_ns = self._now_ns = self._now_ns + NS_PER_SECOND // len(self._templates)
        value = template.at(seq=second * SEQ_PER_TICK, time_ns=time_ns)
        return Record(
            SAMPLES.name,
            self._places[node],
            self._ticks,
            time_ns // NS_PER_MS,
            key_in(DEFAULT_CLUSTER, template.node).encode(),
            value,
        )

    def _pod(self, node: int, pod: PodRecord) -> Record:
        return Record(
            PODS.name, self._places[node], 0, 0, key_in(pod.cluster, pod.uid).encode(), encode(pod)
        )
