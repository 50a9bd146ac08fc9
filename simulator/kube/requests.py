"""The requests about one kind of object, from HTTP to the store and back.

Here live parameters and bodies. Routes and sockets are `server`'s business.
"""

import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from simulator.kube import failures
from simulator.kube.store import Collection, Json, Key
from simulator.kube.writes import create_object, delete_object, patch_object, patch_status

# Field and label selectors: which objects a list or a watch is about.
#
# Here lives the small language of `fieldSelector` (equality alone) and `labelSelector` (equality
# and presence), as far as a reader of pods uses it.

Selector = Callable[[Json], bool]

_TERM: Final = re.compile(r"^\s*([^=!\s]+)\s*(==|!=|=)\s*([^=!]*?)\s*$")
_FIELDS: Final[dict[str, Callable[[Json], str]]] = {
    "metadata.name": lambda item: str(item["metadata"]["name"]),
    "metadata.namespace": lambda item: str(item["metadata"].get("namespace", "")),
    "spec.nodeName": lambda item: str(item.get("spec", {}).get("nodeName", "")),
    "status.phase": lambda item: str(item.get("status", {}).get("phase", "")),
}


def parse_selectors(*, fields: str, labels: str, namespace: str = "") -> Selector:
    """Make one test of both selectors and the namespace; raises ApiError 400."""
    tests = [_field_test(term) for term in fields.split(",") if term]
    tests += [_label_test(term) for term in labels.split(",") if term]
    if namespace:
        tests.append(lambda item: item["metadata"].get("namespace") == namespace)
    return lambda item: all(test(item) for test in tests)


def _field_test(term: str) -> Selector:
    match = _TERM.match(term)
    if not match:
        raise failures.bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
    name, operator, wanted = match.groups()
    if name not in _FIELDS:
        raise failures.bad_request(f"field label not supported: {name}")
    read = _FIELDS[name]
    return lambda item: (read(item) == wanted) is (operator != "!=")


def _label_test(term: str) -> Selector:
    match = _TERM.match(term)
    if not match:
        name = term.strip()
        if name.startswith("!"):
            return lambda item: name[1:] not in _labels(item)
        return lambda item: name in _labels(item)
    name, operator, wanted = match.groups()
    return lambda item: (_labels(item).get(name) == wanted) is (operator != "!=")


def _labels(item: Json) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


Stream = Callable[[web.Request, Collection, Selector], Awaitable[web.StreamResponse]]


class KubeRequests:
    """The requests about one kind of object."""

    def __init__(
        self,
        collection: Collection,
        stream: Stream,
    ) -> None:
        self._collection = collection
        self._stream = stream

    async def read_many(self, request: web.Request) -> web.StreamResponse:
        """List or watch."""
        select = parse_selectors(
            fields=request.query.get("fieldSelector", ""),
            labels=request.query.get("labelSelector", ""),
            namespace=request.match_info.get("namespace", ""),
        )
        if request.query.get("watch") in ("true", "1"):
            return await self._stream(request, self._collection, select)
        return answer(list_objects(self._collection, select, request.query))

    async def read(self, request: web.Request) -> web.Response:
        """Return one object."""
        return answer(self._collection.get(_key(request)))

    async def create(self, request: web.Request) -> web.Response:
        """Create an object."""
        namespace = request.match_info.get("namespace", "")
        return answer(
            create_object(self._collection, await _body(request), namespace=namespace), 201
        )

    async def patch(self, request: web.Request) -> web.Response:
        """Merge into metadata and spec."""
        return answer(patch_object(self._collection, _key(request), await _body(request)))

    async def patch_status(self, request: web.Request) -> web.Response:
        """Merge into the status."""
        return answer(patch_status(self._collection, _key(request), await _body(request)))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete; the grace period stands in the query or in the body."""
        options = await _body(request) if request.can_read_body else {}
        text = request.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        grace_seconds = None if text is None else int(text)
        return answer(delete_object(self._collection, _key(request), grace_seconds=grace_seconds))


def _key(request: web.Request) -> Key:
    return request.match_info.get("namespace", ""), request.match_info["name"]


async def _body(request: web.Request) -> Json:
    try:
        body = orjson.loads(await request.read())
    except ValueError as error:
        raise failures.bad_request(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise failures.bad_request("the body is no object")
    return body


def answer(item: Json, code: int = 200) -> web.Response:
    """Return an object as JSON."""
    return web.Response(body=orjson.dumps(item), status=code, content_type="application/json")


# Answers a list: whole or in pages, at a version that the asker may bound.
#
# Here live `limit`, `continue` and `resourceVersion` of lists. No sockets.


def list_objects(collection: Collection, selector: Selector, query: Mapping[str, str]) -> Json:
    """Return a page of a list as the API server words it; raises ApiError."""
    token = query.get("continue", "")
    if token:
        version, start = _parse_token(token)
        items = collection.snapshot_at(version)
    else:
        _check_version(collection, query)
        start = 0
        version, items = collection.snapshot()
    limit = _number(query, "limit")
    chosen = [item for item in items if selector(item)]
    # A list at version 0 comes from the server's watch cache, which knows no pages.
    unpaged = not limit or (not token and query.get("resourceVersion") == "0")
    end = len(chosen) if unpaged else min(start + limit, len(chosen))
    metadata: Json = {"resourceVersion": str(version)}
    if end < len(chosen):
        metadata["continue"] = _write_token(version, end)
        metadata["remainingItemCount"] = len(chosen) - end
    return {
        "kind": f"{collection.kind}List",
        "apiVersion": collection.api_version,
        "metadata": metadata,
        "items": [_without_type(item) for item in chosen[start:end]],
    }


def _check_version(collection: Collection, query: Mapping[str, str]) -> None:
    asked = _number(query, "resourceVersion")
    current = collection.versions.current
    if asked > current:
        raise failures.too_new(asked, current)
    exact = query.get("resourceVersionMatch") == "Exact"
    if exact and asked != current and not collection.is_kept(asked):
        raise failures.expired("The resourceVersion for the provided list is too old.")
    if exact and asked != current:
        raise failures.bad_request("this server lists only its newest version exactly")


def _without_type(item: Json) -> Json:
    """Drop kind and apiVersion: the items of a typed list carry none."""
    return {name: value for name, value in item.items() if name not in ("kind", "apiVersion")}


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not text.isdigit():
        raise failures.bad_request(f'invalid {name}: "{text}"')
    return int(text)


def _write_token(version: int, start: int) -> str:
    token = {"v": "meta.k8s.io/v1", "rv": version, "start": start}
    return base64.urlsafe_b64encode(orjson.dumps(token)).decode()


def _parse_token(token: str) -> tuple[int, int]:
    try:
        parsed: Any = orjson.loads(base64.urlsafe_b64decode(token))
        return int(parsed["rv"]), int(parsed["start"])
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise failures.bad_request("continue key is not valid") from error
