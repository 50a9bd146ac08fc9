"""`gpuledger completion SHELL`: prints the script that completes commands and options.

Components parse their own command lines, so cyclopts does not know their options. For the script,
each component is replaced by a command with the same options. These commands are never run.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from gpuledger.settings import Option
from gpuledger.settings.command_line import SHARED_OPTIONS
from gpuledger.settings.explain_command import SETTINGS_CLASSES
from gpuledger_cli.option_help import epilogue

_WITH_OWN_OPTIONS: Final = {
    "agent": "gpuledger_agent.command",
    "sink": "gpuledger_sinks.command",
    "standalone": "gpuledger_cli.standalone.standalone_command",
}
"""The module that defines each component's `OPTIONS`."""
_Flag = Annotated[bool, Parameter(negative=())]
app = App(
    name="completion",
    help_format="plaintext",
    help_epilogue=epilogue(
        examples={
            "bash, in ~/.bashrc": "source <(gpuledger completion bash)",
            "zsh, into a directory of your fpath": "gpuledger completion zsh > ~/.zfunc/_gpuledger",
            "fish": "gpuledger completion fish > ~/.config/fish/completions/gpuledger.fish",
        }
    ),
)


@app.default
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Shell to complete for.")],
    /,
) -> None:
    """Print the completion script of a shell."""
    from gpuledger_cli.command import app as commands  # noqa: PLC0415  # it names this module

    gpuledger, config = App(name="gpuledger"), App(name="config")
    for name in SETTINGS_CLASSES:
        module = _WITH_OWN_OPTIONS.get(name)
        options: Sequence[Option] = import_module(module).OPTIONS if module else ()
        gpuledger.command(_stand_in(_arguments(options)), name=name)
    component = Argument(
        "component", Argument.POSITIONAL_ONLY, annotation=Literal[tuple(SETTINGS_CLASSES)]
    )
    config.command(_stand_in([component]), name="explain")
    gpuledger.command(config)
    for name in commands:
        if name[0] != "-" and name not in gpuledger:
            gpuledger.command(commands[name], name=name)
    sys.stdout.write(gpuledger.generate_completion(shell=shell))


def _arguments(options: Sequence[Option]) -> Iterator[Argument]:
    """Yield the arguments of a component: its own, then those of all components."""
    for option in sorted(options, key=lambda option: option.name.startswith("-")):
        kind: Any = _Flag if option.is_flag else str
        if option.choices and all(choice.islower() for choice in option.choices):
            kind = Literal[option.choices]
        is_option = option.name.startswith("-")
        place = Argument.KEYWORD_ONLY if is_option else Argument.POSITIONAL_ONLY
        yield Argument(option.attribute, place, default=None, annotation=kind)
    for name, value, _ in SHARED_OPTIONS:
        attribute = name.lstrip("-").replace("-", "_")
        kind = Path if value else _Flag
        yield Argument(attribute, Argument.KEYWORD_ONLY, default=None, annotation=kind)


def _stand_in(arguments: Iterator[Argument] | Sequence[Argument]) -> Callable[..., None]:
    """Return a function with these arguments, which does nothing."""

    def run(*_: object, **__: object) -> None:
        pass

    signature = Signature(list(arguments))
    run.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` and cyclopts read
    run.__annotations__ = {
        name: argument.annotation for name, argument in signature.parameters.items()
    }
    return run
