"""`gpuledger completion SHELL`: prints the script that completes commands and options."""

import sys
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

_HELP: Final = """
- bash, in ~/.bashrc: source <(gpuledger completion bash)
- zsh, into a directory of your fpath: gpuledger completion zsh > ~/.zfunc/_gpuledger
- fish: gpuledger completion fish > ~/.config/fish/completions/gpuledger.fish
"""
app = App(name="completion", help_epilogue=_HELP, help_format="markdown")


@app.default
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Shell to complete for.")],
    /,
) -> None:
    """Print the completion script of a shell."""
    from gpuledger_cli.command import app as gpuledger  # noqa: PLC0415  # it names this module

    sys.stdout.write(gpuledger.generate_completion(shell=shell))
