"""Messages for arguments that cyclopts rejects: option or argument, problem, value, remedy."""

from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)
from cyclopts.argument import Argument

from gpuledger.texts import find_near, find_remedy


def message_of(error: CycloptsError) -> str:
    """Return the message for an error.

    Errors that gpuledger's options cannot cause keep the message of cyclopts.
    """
    if unknown := _unknown_argument(error):
        return unknown
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword}: given more than once; give it once"
    if (argument := error.argument) is None:
        return str(error)
    see_help = _see_help(error.command_chain or ())
    match error:
        case MissingArgumentError():
            variables = " or ".join(argument.parameter.env_var or ())
            remedy = _choice(argument) or (
                f"give it, or set {variables}" if variables else see_help
            )
            problem = f"missing; {remedy}"
        case CoercionError(token=token) if token:
            number = "give a whole number" if argument.hint is int else ""
            remedy = _choice(argument, token.value) or number or see_help
            problem = f"invalid value {token.value!r}; {remedy}"
        case ValidationError():
            # A validator's message is a sentence, such as `Must be >= 1.`
            limits = error.exception_message.rstrip(".").lower()
            problem = f"invalid value '{argument.value}'; it {limits}"
        case _:
            return str(error)
    return f"{argument.name}: {problem}"


def unknown_command(app: App, given: Sequence[str]) -> str:
    """Return the message for a command that does not exist; empty if all exist.

    Before `--help`, the same applies to an argument of a command that takes none.
    """
    # Not `in app`, which is also true for other spellings, such as `deadletters`.
    if given and not given[0].startswith("-") and given[0] not in [*app]:
        return _unknown_command(app, given[0])
    # For `bill chek --help`, cyclopts would print the help of `bill`.
    if given[-1:] != ["--help"]:
        return ""
    chain, apps, rest = app.parse_commands(given)
    if not rest or rest[0].startswith("-"):
        return ""
    if _names_of(apps[-1], are_options=False):
        return _unknown_command(apps[-1], rest[0], chain)
    # A command that takes arguments may have been given all of them.
    if any(each.is_positional_only() for each in apps[-1].assemble_argument_collection()):
        return ""
    return f"unknown argument: {rest[0].partition('=')[0]}; {_see_help(chain)}"


def _unknown_command(group: App, name: str, chain: Sequence[str] = ()) -> str:
    remedy = _remedy(name, _names_of(group, are_options=False), chain)
    return f"unknown command: {' '.join([*chain, name])}; {remedy}"


def _unknown_argument(error: CycloptsError) -> str:
    """Return the message for an argument that the command does not accept; empty for others."""
    given = error.unused_tokens or [""]
    match error:
        case UnknownCommandError(app=App() as group) if not given[0].startswith("-"):
            return _unknown_command(group, given[0], error.command_chain or ())
        case UnknownOptionError(token=token):
            argument = token.keyword or token.value
        # If an option is missing as well, a mistyped name is more likely the cause.
        case UnknownCommandError() | UnusedCliTokensError() | MissingArgumentError():
            argument = given[0].partition("=")[0]
        case _:
            return ""
    is_option = argument.startswith("-")
    names = _names_of(error.app, are_options=is_option) if error.app else []
    if not argument or argument in names:
        return ""
    remedy = _remedy(argument, names, error.command_chain or ())
    return f"unknown {'option' if is_option else 'argument'}: {argument}; {remedy}"


def _names_of(app: App, *, are_options: bool) -> list[str]:
    """Return the names of an app's options, or of its commands."""
    arguments = app.assemble_argument_collection() if are_options and app.default_command else ()
    names = [*app, *(name for argument in arguments for name in argument.names)]
    return [name for name in names if name.startswith("-") == are_options]


def _remedy(name: str, known: Sequence[str], chain: Sequence[str]) -> str:
    """Return the remedy for an unknown name: the known name that was meant, or the help."""
    near = find_near(name, known)
    return f"did you mean `{near}`?" if near else _see_help(chain)


def _see_help(chain: Sequence[str]) -> str:
    return f"see `{' '.join(['gpuledger', *chain])} --help`"


def _choice(argument: Argument, value: str = "") -> str:
    """Return the remedy for an argument with choices; empty if it accepts other values."""
    hint = get_args(argument.hint)[0] if get_origin(argument.hint) is list else argument.hint
    if get_origin(hint) is not Literal:
        return ""
    return find_remedy(value, [str(choice) for choice in get_args(hint)])
