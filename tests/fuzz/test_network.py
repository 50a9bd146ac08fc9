"""Input from the network: requests to the HTTP endpoint, and responses of the API server."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw
from structlog.testing import capture_logs

from gpuledger.runtime import Readiness
from gpuledger.runtime.http.health_pages import HealthPages
from gpuledger.runtime.http.server import serve
from gpuledger_enricher.podwatch.api import KubernetesError
from gpuledger_enricher.podwatch.events import Deleted, Upserted, WatchReader
from gpuledger_enricher.podwatch.kinds import KINDS, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_enricher.podwatch.publish import encode_bounded
from gpuledger_enricher.watched_records import WatchedRecord
from tests.default_topics import TOPICS
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.unit.enricher.podwatch.builders import Object, encoded, owned_by, pod

REQUESTS = [
    b"GET /metrics HTTP/1.1\r\nHost: a:9400\r\nAccept: text/plain\r\nAccept-Encoding: gzip\r\n\r\n",
    b"HEAD /readyz HTTP/1.0\r\nConnection: keep-alive\r\nAuthorization: Basic YTpi\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" * 2,
]
GOOD = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
OWNED = pod(metadata={"ownerReferences": [owned_by("Job", "j")], "labels": {"app": "a"}})


def gpu_pod(limits: Object) -> Object:
    """Return a pod that requests GPUs in every way."""
    mps = {"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "12.5"}
    resources = {"limits": limits, "claims": [{"name": "gpus"}]}
    claims = [{"name": "gpus", "resourceClaimName": "two-gpus"}]
    container = {"name": "main", "env": [mps], "resources": resources}
    return pod(spec={"containers": [container], "resourceClaims": claims})


REFUSED = pod(
    node=None,
    metadata={"annotations": {"scheduling.volcano.sh/queue-name": "q"}},
    spec={
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}],
        "schedulingGates": [{"name": "example.com/quota"}],
    },
    status={
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}
        ]
    },
)
LABELS = {"karpenter.sh/nodepool": "gpus", "eks.amazonaws.com/capacityType": "SPOT"}
OF_A_NODE = {"uid": "n1", "name": "node-1", "labels": LABELS, "annotations": {"a/b": "c"}}
OBJECTS = [
    encoded(pod()),
    encoded(OWNED),
    encoded(gpu_pod({"nvidia.com/gpu": "1"})),
    encoded(REFUSED),
    encoded({"metadata": OF_A_NODE}),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
LINES = [
    orjson.dumps({"type": kind, "object": item})
    for kind in ("ADDED", "DELETED")
    for item in (OWNED, REFUSED)
] + [
    encoded({"type": "MODIFIED", "object": {"metadata": OF_A_NODE}}),
    b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"5"}}}',
    b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"m"}}',
]


async def exchange(host: str, port: int, data: bytes) -> bytes:
    """Send bytes, then end of file; return the response up to the end of the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@given(data=st.lists(changed_bytes(REQUESTS), min_size=1, max_size=5))
def test_the_http_endpoint_answers_after_any_request(data: list[bytes]) -> None:
    async def run() -> None:
        async with serve(HealthPages(Readiness()), host="127.0.0.1", port=0) as (host, port):
            for one in data:
                found = await exchange(host, port, one)
                assert found == b"" or found.startswith(b"HTTP/1.1 ")
                assert not found.startswith(b"HTTP/1.1 500 ")
            assert (await exchange(host, port, GOOD)).startswith(b"HTTP/1.1 200 ")

    with capture_logs() as lines:
        asyncio.run(run())
    assert "page_failed" not in {line["event"] for line in lines}


SETTINGS = PodwatchSettings(
    labels=["*"],
    annotations=["a/b"],
    node_labels=["*"],
    namespace_labels=["*"],
    namespace_annotations=["a/b"],
)


def reader(kind: ObjectKind[Any]) -> WatchReader[Any]:
    return WatchReader(kind.reader(SETTINGS), kind=kind.name)


def check(kind: ObjectKind[Any], record: WatchedRecord) -> None:
    """The records that podwatch publishes can be read."""
    kind.decoder(TOPICS).decode(encode_bounded(record, kind=kind, topics=TOPICS))


@each_kind
@given(line=changed_bytes(LINES) | changed_json(LINES))
def test_a_watch_line_is_read_or_skipped_or_is_an_error_of_the_server(
    kind: ObjectKind[Any], line: bytes
) -> None:
    try:
        found = reader(kind).read(line)
    except KubernetesError:
        return
    if isinstance(found, Upserted | Deleted):
        check(kind, found.record)


@each_kind
@example(item=encoded(pod(status={"containerStatuses": [{"name": "m", "restartCount": 2**63}]})))
@example(item=encoded(gpu_pod({"nvidia.com/gpu": str(2**70)})))
@given(item=changed_bytes(OBJECTS) | changed_json(OBJECTS))
def test_an_item_of_a_list_is_read_or_skipped(kind: ObjectKind[Any], item: bytes) -> None:
    found = reader(kind).item(Raw(item))
    if isinstance(found, Upserted):
        check(kind, found.record)
