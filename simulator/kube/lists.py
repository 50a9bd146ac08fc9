"""Answers a list: whole or in pages, at a version that the asker may bound.

Here live `limit`, `continue` and `resourceVersion` of lists. No sockets.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import orjson

from simulator.kube import failures
from simulator.kube.selectors import Selector
from simulator.kube.store import Collection, Json


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
