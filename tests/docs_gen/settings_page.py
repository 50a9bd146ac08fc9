"""reference/settings.md: every setting of each component, from the settings classes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gpuledger.settings.build import describe
from gpuledger.settings.explanation import show_default
from gpuledger.settings.sources import REQUIRED, Setting
from tests.docs_gen.components import COMPONENTS, Component
from tests.docs_gen.markdown import code, head, table

_HEAD: Final = head(
    "Settings",
    audience="SRE",
    about="""\
This page lists the settings of each component. Use it to write a settings file or to set variables.
`gpuledger config explain COMPONENT` prints the same for one component.""",
)
_SOURCES: Final = """
- Set a value in the YAML file that you pass with `--config`, or in an environment variable. In the
  file, write a mapping for each part of the name. Variables override the file, and options override
  both.
- The name of a variable is `GPULEDGER_` and the setting's name in upper case, with `__` for each
  dot.
- To read a setting of type "secret" from a file, put the path of the file into the setting
  `NAME_file` or the variable `VARIABLE_FILE`.
- The default "none" means that a text or path is not set. To unset it, use null or the empty text.
- In a variable, separate the items of a list by commas, and write a mapping as JSON or YAML.
- **Bold** settings are common: `--help` lists them.
- `--print-config` prints the settings in force, with secrets masked.
"""
_SHARED: Final = """
## Shared settings

The agent, podwatch, the join and the sinks have these settings. Reports has only `http.*` and
`log.*`, because it does not connect to Kafka.
"""
_SHARED_BY: Final = 4
"""Minimum number of components with a setting that this page lists only once."""
_COLUMNS: Final = ("setting", "variable", "type", "default", "meaning")
_Found = dict[str, dict[str, Setting]]


def settings_page() -> str:
    """Return the page, in Markdown."""
    found: _Found = {}
    for component in COMPONENTS:
        for setting in () if component.introduction else component.settings:
            found.setdefault(setting.name, {})[component.name] = setting
    shared = {name: owners for name, owners in found.items() if len(owners) >= _SHARED_BY}
    lines = [*_HEAD.splitlines(), *_SOURCES.splitlines(), *_SHARED.splitlines(), ""]
    lines += table(_COLUMNS, _shared_rows(shared))
    for component in COMPONENTS:
        known = shared
        if component.introduction:
            known = {
                each.name: found[each.name]
                for each in component.settings
                if each.default in [other.default for other in found.get(each.name, {}).values()]
            }
        lines += _section(component, without=known)
    return "\n".join([*lines, ""])


def _shared_rows(shared: _Found) -> Iterator[tuple[str, ...]]:
    for name, owners in shared.items():
        is_common = any(name in each.common for each in COMPONENTS)
        defaults = {owner: _default(setting) for owner, setting in owners.items()}
        default = defaults["agent"]
        if len({*defaults.values()}) > 1:
            default = ", ".join(f"{owner} {shown}" for owner, shown in defaults.items())
        yield _row(owners["agent"], is_common=is_common, default=default)


def _section(component: Component, *, without: Mapping[str, object]) -> Iterator[str]:
    own = [setting for setting in component.settings if setting.name not in without]
    yield from ("", f"## {component.name.capitalize()}", "")
    if component.introduction:
        yield from (component.introduction, "")
    for title, settings in _by_group(component, own).items():
        if title:
            yield from ("", f"### {title}", "")
        rows = (_row(each, is_common=each.name in component.common) for each in settings)
        yield from table(_COLUMNS, rows)


def _by_group(component: Component, settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Return settings by subheading: the sinks have one for each kind of sink."""
    kinds = {
        kind for option in component.options for kind in option.choices if option.chooses_section
    }
    found: dict[str, list[Setting]] = {}
    for setting in settings:
        group = setting.path[0]
        found.setdefault(f"Sink {group}" if group in kinds else "", []).append(setting)
    return found


def _row(setting: Setting, *, is_common: bool, default: str | None = None) -> tuple[str, ...]:
    return (
        f"**{code(setting.name)}**" if is_common else code(setting.name),
        code(setting.variable),
        "secret" if setting.is_secret else _type(setting),
        _default(setting) if default is None else default,
        setting.meaning,
    )


def _type(setting: Setting) -> str:
    """Return the accepted values, without the article and the example of `--help`."""
    described = describe(setting.type).removeprefix("a ")
    return "mapping" if described.startswith("mapping") else described


def _default(setting: Setting) -> str:
    if setting.default is REQUIRED:
        return "required"
    shown = show_default(setting.default)
    return shown if shown == "none" else code(shown)
