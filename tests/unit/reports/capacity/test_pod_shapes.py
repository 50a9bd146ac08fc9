"""How many GPUs, MIG instances or shares a pod requests."""

import orjson
import pytest

from gpuledger_reports.capacity.pod_shapes import Request, read_shape


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([{"nvidia.com/gpu": 1}], Request("1 GPU", 1)),
        ([{"nvidia.com/gpu": 4}, {"nvidia.com/gpu": 4}], Request("8 GPUs", 8)),
        ([{"nvidia.com/mig-1g.10gb": 1}], Request("1g.10gb", 1 / 7)),
        ([{"nvidia.com/mig-3g.40gb": 2}], Request("2 x 3g.40gb", 6 / 7)),
        ([{"nvidia.com/mig-2g.12gb": 1}], Request("2g.12gb", 0.5)),
        ([{"nvidia.com/mig-1c.3g.40gb": 1}], Request("1c.3g.40gb", 1 / 7)),
        ([{"nvidia.com/gpu.shared": 1}], Request("share", None)),
        ([{"nvidia.com/mig-1g.10gb.shared": 1}], Request("share", None)),
        ([{"nvidia.com/gpu": 2, "nvidia.com/gpucores": 30}], Request("share", 0.6)),
        ([{"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}], Request("share", None)),
        ([{"koordinator.sh/gpu-core": 50}], Request("share", 0.5)),
        ([{}], Request("claim", None)),
    ],
)
def test_a_pod_has_a_size_in_gpus_if_its_request_states_one(
    requests: list[dict[str, int]], expected: Request
) -> None:
    written = [
        orjson.dumps({name: str(amount) for name, amount in each.items()}).decode()
        for each in requests
    ]
    found = read_shape(written, {"2g.12gb": 0.5})
    assert found.name == expected.name
    assert found.gpus == pytest.approx(expected.gpus)


@pytest.mark.parametrize(
    "damaged",
    [
        '{"nvidia.com/gpu":"1k"}',
        '{"nvidia.com/gpu":"1.5"}',
        '{"nvidia.com/gpu":"18000000000000000000"}',
        '{"koordinator.sh/gpu-core":"9000000000000000000"}',
        '{"a":null}',
        '{"a":[]}',
        "[]",
        "{",
    ],
)
def test_a_request_that_cannot_be_read_has_an_unknown_shape(damaged: str) -> None:
    assert read_shape(['{"nvidia.com/gpu":"1"}', damaged], {}) == Request("unknown", None)
