"""reference/settings.md has every setting of each component, and marks the common ones."""

import re

import pytest

from tests.docs_gen.components import COMPONENTS, Component
from tests.docs_gen.settings_page import settings_page

SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", settings_page(), re.MULTILINE))


def names(section: str, *, only_common: bool = False) -> set[str]:
    pattern = r"^\| \*\*`([\w.]+)`\*\* \|" if only_common else r"^\| (?:\*\*)?`([\w.]+)`"
    return set(re.findall(pattern, SECTIONS[section], re.MULTILINE))


WHOLE = [component for component in COMPONENTS if not component.introduction]


@pytest.mark.parametrize("component", WHOLE, ids=lambda each: each.name)
def test_every_setting_of_a_component_is_shared_or_in_its_section(component: Component) -> None:
    own, shared = names(component.name.capitalize()), names("Shared settings")

    assert own & shared == set()
    assert {setting.name for setting in component.settings} <= own | shared
    assert own <= {setting.name for setting in component.settings}


def test_every_setting_of_standalone_is_on_the_page() -> None:
    (standalone,) = (each for each in COMPONENTS if each.introduction)
    listed = set[str]().union(*map(names, SECTIONS))

    assert {setting.name for setting in standalone.settings} <= listed
    assert names("Standalone") == {"sinks", "maintain"}


@pytest.mark.parametrize("component", WHOLE, ids=lambda each: each.name)
def test_the_settings_that_help_shows_are_marked(component: Component) -> None:
    section = component.name.capitalize()

    assert len(component.common) >= 10
    assert names(section, only_common=True) == component.common & names(section)
    assert component.common - names(section) <= names("Shared settings", only_common=True)


def test_reports_has_only_the_shared_settings_that_the_page_lists() -> None:
    (reports,) = (each for each in COMPONENTS if each.name == "reports")
    shared = names("Shared settings")
    has = {setting.name for setting in reports.settings} & shared

    assert has == {name for name in shared if name.startswith(("http.", "log."))}
    for component in WHOLE:
        if component is not reports:
            assert shared <= {setting.name for setting in component.settings}


def test_a_secret_is_marked_and_a_default_that_differs_names_its_components() -> None:
    shared = SECTIONS["Shared settings"]

    assert "| **`kafka.sasl_password`** | `GPULEDGER_KAFKA__SASL_PASSWORD` | secret |" in shared
    assert "agent `gpuledger-agent`, podwatch `gpuledger-podwatch`" in shared
