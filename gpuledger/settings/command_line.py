"""The command line of a component: `--config`, `--print-config`, `--version`, `--help`.

This module puts the sources in order: defaults, YAML file, environment, options.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import yaml
from typing_extensions import override

from gpuledger import __version__
from gpuledger.errors import SettingsError
from gpuledger.settings.build import build
from gpuledger.settings.explanation import fold, summarize
from gpuledger.settings.secret import MASK, mask_address, mask_texts, mask_value
from gpuledger.settings.sources import (
    Given,
    Layer,
    Setting,
    find_meant,
    read_environment,
    read_yaml,
    settings_of,
)
from gpuledger.texts import find_near

S = TypeVar("S", bound=msgspec.Struct)
_SHOWN_SETTINGS: Final = 10
EXIT_CODES: Final = {
    0: "ended by SIGTERM or SIGINT",
    1: "failed",
    2: "invalid settings or arguments, or a missing extra",
}
"""Exit codes of all components."""

_CONFIG: Final = ("--config", "FILE", "settings file (YAML)")
_PRINT_CONFIG: Final = ("--print-config", "", "print the settings, secrets masked, and exit")
SHARED_OPTIONS: Final = (_CONFIG, _PRINT_CONFIG)
"""Name, value and help of the options of every component, next to `--help` and `--version`."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A command line option of one component: another way to set one of its settings."""

    name: str
    """`--source` for an option, `kind` for an optional positional argument."""
    setting: str
    """The setting that the option sets, with groups separated by dots."""
    help: str
    """One sentence for `--help`."""
    choices: tuple[str, ...] = ()
    """The values that `--help` names; the setting's type decides what is accepted."""
    metavar: str = ""
    """Name of the value in `--help`; empty means the option's name."""
    is_flag: bool = False
    """Whether the option takes no value and sets its setting to true."""
    chooses_section: bool = False
    """Whether the option's choices are names of settings sections. Only the chosen section applies,
    and `--help` after a choice leaves out the other sections."""

    @property
    def is_word(self) -> bool:
        """Whether it is a positional argument."""
        return not self.name.startswith("-")

    @property
    def attribute(self) -> str:
        """Return the name of the attribute that has the option's value in argparse's result."""
        return self.name.lstrip("-").replace("-", "_")


def load_settings(
    model: type[S],
    *,
    prog: str,
    description: str,
    options: Sequence[Option] = (),
    examples: Sequence[str] = (),
    common: Sequence[str] = (),
    codes: Mapping[int, str] | None = None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    complete: Callable[[Layer], Layer] | None = None,
    ignores_other_sections: bool = False,
) -> S:
    """Return the settings: defaults < YAML file < environment < options.

    With `ignores_other_sections`, file and environment may also hold another program's settings.
    `--help` shows the `examples`, the first ten of the `common` settings, named as in the file, and
    all exit codes, including `codes`. `complete` is called with all values from these sources, and
    returns a layer of values that override only defaults. `--help`, `--version` and
    `--print-config` print and raise `SystemExit(0)`. Raises `SettingsError`, which names setting,
    value and remedy.
    """
    settings = settings_of(model)
    introduction = _introduction(description, examples)
    parser = _Parser(
        prog=prog,
        description=introduction,
        settings=settings,
        common=common,
        codes=codes or {},
    )
    parser.add_options(options)
    parsed = parser.parse_args(argv)
    lenient = {"ignores_other_sections": ignores_other_sections}
    layers = [
        *([read_yaml(parsed.config, settings, **lenient)] if parsed.config else []),
        read_environment(os.environ if environ is None else environ, settings, **lenient),
        {
            tuple(option.setting.split(".")): Given(value=value, origin=option.name, is_text=True)
            for option in options
            if (value := getattr(parsed, option.attribute)) is not None
        },
    ]
    if complete:
        layers = [complete({path: one for layer in layers for path, one in layer.items()}), *layers]
    loaded = build(model, layers)
    if parsed.print_config:
        sys.stdout.write(printed(loaded))
        raise SystemExit(0)
    return loaded


def printed(settings: msgspec.Struct) -> str:
    """Return settings as YAML, with a mask for each secret and for values that may hold one."""
    shown = _masked(settings_of(type(settings)), (), msgspec.to_builtins(settings, enc_hook=str))
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _masked(settings: Sequence[Setting], path: tuple[str, ...], value: Any) -> Any:  # noqa: ANN401  # any built-in value
    """Return a value in which secrets are masked.

    Masks secrets in addresses, and all texts in mappings, such as headers.
    """
    if isinstance(value, dict):
        return {
            mask_value(key): _masked(settings, (*path, key), inner) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(settings, (*path, ""), inner) for inner in value]
    if not isinstance(value, str):
        return value
    is_of_mapping = any(setting.path == path[:-1] and path[-1] for setting in settings)
    return MASK if is_of_mapping else mask_address(value)


class HelpStyle(argparse.RawDescriptionHelpFormatter):
    """Formats help with the heading `Usage:`, like the help of the commands."""

    @override
    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises `SettingsError` with the remedy for an invalid argument."""

    def __init__(
        self, *, prog: str, description: str, usage: str | None = None, epilog: str | None = None
    ) -> None:
        """Take the name of the program and the texts of its help."""
        super().__init__(
            prog=prog,
            description=description,
            usage=usage,
            epilog=epilog,
            formatter_class=HelpStyle,
            allow_abbrev=False,
        )
        # The headings of the commands' help.
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        self._given: Sequence[str] = ()

    @override
    def parse_args(  # type: ignore[override]  # the form without a namespace
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        self._given = sys.argv[1:] if args is None else args
        parsed, unknown = self.parse_known_args(self._given)
        if unknown:
            # Without the value, which may be secret.
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            raise SettingsError(f"unknown {kind}: {mask_address(name)}; {self.remedy_of(name)}")
        return parsed

    def suggest(self, near: str | None) -> str:
        """Return the remedy for an unknown name: the name that was probably meant, or the help."""
        return f"did you mean `{near}`?" if near else f"see `{self.prog} --help`"

    def remedy_of(self, name: str) -> str:
        """Return the remedy for an unknown option or argument."""
        return self.suggest(self.near_option(name))

    def near_option(self, name: str) -> str | None:
        """Return the option that was probably meant; `None` for an argument."""
        return find_near(name, self._option_string_actions) if name.startswith("-") else None

    @override
    def error(self, message: str) -> NoReturn:
        problem = mask_texts(message.removeprefix("argument "), self._given)
        raise SettingsError(f"{problem}; see `{self.prog} --help`")


class _Parser(OneLineParser):
    def __init__(
        self,
        *,
        prog: str,
        description: str,
        settings: Sequence[Setting],
        common: Sequence[str],
        codes: Mapping[int, str],
    ) -> None:
        super().__init__(prog=prog, description=description)
        self._settings, self._common = settings, common
        self._codes = {**EXIT_CODES, **codes}
        self._options: Sequence[Option] = ()

    def add_options(self, options: Sequence[Option]) -> None:
        """Add a component's own options, then those of all components."""
        self._options = options
        for option in options:
            details: dict[str, Any] = {
                "help": option.help,
                "metavar": "|".join(option.choices) or option.metavar or None,
            }
            if option.is_flag:
                details = {"help": option.help, "action": "store_const", "const": "true"}
            if option.is_word:
                details["nargs"] = "?"
            self.add_argument(option.name, **details)
        name, metavar, text = _CONFIG
        self.add_argument(name, type=Path, metavar=metavar, help=text)
        name, _, text = _PRINT_CONFIG
        self.add_argument(name, action="store_true", help=text)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    @override
    def format_help(self) -> str:
        # Built only for help, because the settings' meanings are parsed from the source code.
        self.epilog = "\n".join(self._epilog())
        return super().format_help()

    @override
    def _print_message(self, message: str, file: Any = None) -> None:  # argparse's own signature
        # Unlike argparse's own method, this raises errors in writing.
        if message and file:
            file.write(message)
            file.flush()

    def _epilog(self) -> Iterator[str]:
        shown = shown_settings(
            self._settings, options=self._options, common=self._common, given=self._given
        )
        if shown:
            yield "Common settings, by name in the file, with default and environment variable:\n"
            yield summarize(shown)
        yield "Exit codes:"
        yield from (f"  {code:<3}  {text}" for code, text in sorted(self._codes.items()))
        yield ""
        component = self.prog.removeprefix("gpuledger ")
        explain = f"gpuledger config explain {component}"
        yield f"All {len(self._settings)} settings: {explain}"
        for section in sorted(_chosen(self._options, self._given)):
            yield f"Settings of {section} only: {explain} {section}"

    @override
    def parse_args(  # type: ignore[override]  # the form without a namespace
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        word, *rest = (sys.argv[1:] if args is None else args) or [""]
        # argparse would print the help for `gpuledger help sink sotre`.
        if rest == ["--help"] and not word.startswith("-"):
            words = [name for option in self._options if option.is_word for name in option.choices]
            if word not in words:
                remedy = self.suggest(find_near(word, words))
                raise SettingsError(f"unknown argument: {mask_address(word)}; {remedy}")
        return super().parse_args(args)

    @override
    def remedy_of(self, name: str) -> str:
        applicable = _applicable(self._settings, self._options, self._given)
        named = {setting.name: setting for setting in applicable}
        setting = name.lstrip("-").replace("-", "_")
        meant = find_meant(setting, named)
        # The exact name of a setting, even without its group, counts more than a similar option.
        if meant and (not self.near_option(name) or f".{meant}".endswith(f".{setting}")):
            return f"set {named[meant].variable}, or {meant} in the settings file"
        return super().remedy_of(name)


def shown_settings(
    settings: Sequence[Setting],
    *,
    options: Sequence[Option],
    common: Sequence[str],
    given: Sequence[str] = (),
) -> list[Setting]:
    """Return the settings, at most ten, that `--help` shows if it follows the given arguments."""
    by_name = {setting.name: setting for setting in settings}
    listed = [by_name[name] for name in common]
    return _applicable(listed, options, given)[:_SHOWN_SETTINGS]


def _applicable(
    settings: Iterable[Setting], options: Sequence[Option], given: Sequence[str]
) -> list[Setting]:
    """Return the settings without the sections that the command line did not choose."""
    sections = {name for option in options if option.chooses_section for name in option.choices}
    chosen = _chosen(options, given)
    left_out = sections - chosen if chosen else set()
    return [setting for setting in settings if setting.path[0] not in left_out]


def _introduction(description: str, examples: Sequence[str]) -> str:
    """Return the text above the options in `--help`."""
    parts = description.split("\n\n")
    paragraphs = [text if text.startswith(" ") else fold(text) for text in parts]
    listed = "\n".join(("Examples:", *(f"  {example}" for example in examples)))
    return "\n\n".join([*paragraphs, *([listed] if examples else [])])


def _chosen(options: Sequence[Option], given: Sequence[str]) -> set[str]:
    """Return the sections that the command line chose."""
    sections = (option.choices for option in options if option.chooses_section)
    return {name for names in sections for name in names if name in given}
