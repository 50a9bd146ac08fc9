"""Describes the endpoints: in OpenAPI, and the capacity reports also as a list.

`openapi.yaml` has all endpoints except the capacity reports, which are described by the registry.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gpuledger_reports.api.endpoints import CAPACITY
from gpuledger_reports.api.questions import MEDIA_TYPES
from gpuledger_reports.capacity.asking import parameters_of
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import Report

DESCRIPTION_FILE: Final = Path(__file__).with_name("openapi.yaml")
_OPTION: Final = re.compile(r"--([a-z-]+)")


@cache
def description() -> bytes:
    """Return the service's OpenAPI description as JSON."""
    content = yaml.safe_load(DESCRIPTION_FILE.read_text(encoding="utf-8"))
    errors = {s: one for s, one in content["paths"]["/bill"]["get"]["responses"].items() if s > "3"}
    for report in REPORTS.values():
        content["paths"][f"{CAPACITY}/{report.name}"] = {"get": _endpoint(report, errors)}
    return msgspec.json.encode(content)


@cache
def capacity_list() -> bytes:
    """Return the capacity reports with their parameters as JSON."""
    reports = [
        {
            "name": report.name,
            "path": f"{CAPACITY}/{report.name}",
            "summary": report.summary,
            "parameters": {one["name"]: one["description"] for one in _parameters(report)},
        }
        for report in REPORTS.values()
    ]
    return msgspec.json.encode({"reports": reports}) + b"\n"


def _endpoint(report: Report, errors: dict[str, Any]) -> dict[str, Any]:
    schemas: dict[str, Any] = {
        "json": _schema(report),
        "csv": {"type": "string"},
        "parquet": {"type": "string", "format": "binary"},
    }
    content = {MEDIA_TYPES[name]: {"schema": schema} for name, schema in schemas.items()}
    return {
        "operationId": f"capacity_{report.name}",
        "summary": report.summary,
        "description": _of_requests(report.about),
        "parameters": _parameters(report),
        "responses": {"200": {"description": "The answer.", "content": content}, **errors},
    }


def _parameters(report: Report) -> list[dict[str, Any]]:
    found = [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": _of_requests(option.help),
            "schema": {"type": "string", **({"default": option.default} if option.default else {})},
        }
        for name, option in parameters_of(report).items()
    ]
    formats = {"type": "string", "enum": [*MEDIA_TYPES], "default": "json"}
    text = "Format of the answer. Notes are only in JSON."
    chosen = {"name": "format", "in": "query", "required": False, "description": text}
    return [*found, {**chosen, "schema": formats}]


def _schema(report: Report) -> dict[str, Any]:
    """Return the schema of a report's answer in JSON; each dimension of `by` is a column too."""
    text = {"type": ["string", "object", "array", "null"]}
    number = {"type": ["number", "null"]}
    columns = {name: text if name in report.texts else number for name in report.columns}
    row = {"type": "object", "required": [*columns], "properties": columns}
    return {"allOf": [{"$ref": "#/components/schemas/CapacityAnswer"}]} | {
        "properties": {"rows": {"type": "array", "items": row}}
    }


def _of_requests(text: str) -> str:
    """Return a text about options of the command as one about parameters."""
    return _OPTION.sub(lambda found: found[1].replace("-", "_"), text)
