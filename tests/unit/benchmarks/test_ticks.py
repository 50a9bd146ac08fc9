"""The ticks that benchmarks and chaos runs publish."""

from itertools import pairwise

from msgspec.structs import replace

from benchmarks.ticks import CONTAINERS, GPUS, PROCESSES, Fleet, template_of
from gpuledger.codec import Decoder
from gpuledger.records import NodeSample
from tests.default_topics import SAMPLES

decode = Decoder(topic=SAMPLES.name, record=NodeSample).decode


def test_the_same_seed_gives_the_same_ticks() -> None:
    assert Fleet(nodes=2).tick(1, 5) == Fleet(nodes=2).tick(1, 5)


def test_wall_clock_and_uptime_advance_together() -> None:
    fleet = Fleet(nodes=1)
    for tick, later in pairwise(fleet.tick(0, number) for number in range(3)):
        assert later.time_ns - tick.time_ns == (later.seq - tick.seq) * 1_000_000 == 1_000_000_000


def test_a_template_gives_the_tick_with_only_another_seq_and_time() -> None:
    tick = Fleet(nodes=1).tick(0, 7)
    made = decode(template_of(tick).at(seq=12_345, time_ns=67_890))
    assert made == replace(tick, seq=12_345, time_ns=67_890)


def test_a_tick_has_the_size_that_all_figures_assume() -> None:
    tick = Fleet(nodes=1).tick(0, 0)
    assert (len(tick.gpus), len(tick.processes), len(tick.containers)) == (8, 20, 10)
    assert (GPUS, PROCESSES, CONTAINERS) == (8, 20, 10)


def test_every_container_of_a_tick_is_one_of_the_nodes_pods() -> None:
    fleet = Fleet(nodes=2)
    pods = {pod.uid: pod for pod in fleet.pods(1)}
    for container in fleet.tick(1, 0).containers:
        pod = pods[container.pod_uid or ""]
        assert [one.container_id for one in pod.containers] == [container.container_id]
