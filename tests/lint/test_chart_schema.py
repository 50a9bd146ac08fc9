"""The schema of the chart's values accepts the settings that the components accept."""

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from jsonschema import Draft7Validator

from gpuledger.settings.explain_command import SETTINGS_CLASSES
from gpuledger.settings.sources import Setting, settings_of
from gpuledger_reports.pricing.policy_file import DEFAULT_FILE
from tests.docs_gen.chart_schema import COMPONENTS, SCHEMA, chart_schema
from tests.tables import for_each

ROOT: Final = Path(__file__).parents[2]
VALUES: Final[tuple[object, ...]] = (
    *(None, True, "", "text", "1.2", -1, 0, 0.5, 30, 10**20),
    *([], ["text"], [1], {}, {"name": "text"}, {"name": 1}),
)


def setting_cases() -> list[tuple[str, Setting]]:
    classes = [SETTINGS_CLASSES[component] for component in COMPONENTS]
    found = [getattr(import_module(module), name) for module, name in classes]
    return [(each.__name__, setting) for each in found for setting in settings_of(each)]


@cache
def validator_of(name: str) -> Draft7Validator:
    schema = json.loads(SCHEMA.read_text())
    return Draft7Validator({"definitions": schema["definitions"], "$ref": f"#/definitions/{name}"})


def from_text(wanted: type, value: object) -> object:
    if isinstance(value, str):
        return wanted(value)
    raise ValueError


def fits(value: object, setting: Setting) -> bool:
    try:
        msgspec.convert(value, setting.type, dec_hook=from_text)
    except msgspec.ValidationError:
        return value is None and setting.default == ""
    return True


def within(path: tuple[str, ...], value: object) -> Any:  # noqa: ANN401  # any setting
    return {path[0]: within(path[1:], value)} if path else value


def test_the_committed_schema_is_the_generated_one() -> None:
    text = SCHEMA.read_text()

    assert chart_schema(text) == text, "run `make schemas`"


@for_each("name,setting", setting_cases())
def test_the_schema_accepts_the_values_that_the_setting_accepts(
    name: str, setting: Setting
) -> None:
    validator = validator_of(name)

    assert [value for value in VALUES if validator.is_valid(within(setting.path, value))] == [
        value for value in VALUES if fits(value, setting)
    ]


@for_each("file", [DEFAULT_FILE, ROOT / "deploy" / "bill" / "prices.yaml"])
def test_the_schema_accepts_price_files_and_rejects_unknown_fields(file: Path) -> None:
    # Days become texts, as in Helm.
    prices = json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))
    validator = validator_of("BillPolicy")

    validator.validate(prices)
    assert not validator.is_valid(prices | {"price": []})
    assert not validator.is_valid(prices | {"prices": [{"name": "all", "per_hour": 1}]})
    for wrong in ([1], "2,50", "dear", "0x10"):
        assert not validator.is_valid({"prices": [{"name": "all", "per_gpu_hour": wrong}]})
