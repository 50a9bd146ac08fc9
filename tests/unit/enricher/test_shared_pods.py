"""Equal parts of pods are kept in memory once."""

from gpuledger.codec import Decoder, encode
from gpuledger.records import ContainerRequest, PodContainer, PodRecord
from gpuledger_enricher.watched_records import PodSharing
from tests.default_topics import PODS
from tests.unit.enricher.join.ticks import pod

DECODER = Decoder(topic=PODS.name, record=PodRecord)


def decoded(record: PodRecord) -> PodRecord:
    """Return a record with strings and dictionaries of its own."""
    return DECODER.decode(encode(record))


def test_a_shared_record_equals_the_original() -> None:
    """Each field is the same, including absent ones."""
    for record in (pod(), pod(owner_kind=None, owner_name=None, qos_class="Burstable", priority=3)):
        assert PodSharing().share(decoded(record)) == decoded(record)


def test_two_pods_of_a_workload_share_equal_parts() -> None:
    """Their names, labels and requests are the same objects."""
    sharing = PodSharing()
    one, other = (sharing.share(decoded(pod(number))) for number in (0, 1))
    assert one.labels is other.labels
    assert one.containers[0].requested is other.containers[0].requested
    for name in ("namespace", "node", "owner_kind", "owner_name", "phase"):
        assert getattr(one, name) is getattr(other, name), name
    assert one.created_time_ns is other.created_time_ns
    assert one.containers[0].name is other.containers[0].name


def test_the_memory_for_shared_parts_is_bounded() -> None:
    """Labels can be different in each pod; the records stay right."""
    sharing = PodSharing(max_shared=5)
    for number in range(50):
        requested = ContainerRequest(resources={"gpu": number})
        container = PodContainer(name="main", kind="init", requested=requested, restarts=0)
        record = pod(labels={"job": str(number)}, containers=[container])
        assert sharing.share(decoded(record)) == decoded(record)
        assert len(sharing) <= 10
