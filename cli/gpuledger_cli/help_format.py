"""Format the help of commands like the components' help: headings instead of boxes."""

import re
from typing import TYPE_CHECKING, Final

from cyclopts.help import DescriptionRenderer, HelpPanel, NameRenderer

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

# As cyclopts writes required options: `--store STR`, `--format LITERAL[STRIMZI, ACLS]`.
_TYPED_OPTION: Final = re.compile(r"--([a-z-]+) (?:LITERAL\[[^\]]*\]|[A-Z]\S*)")
_TITLES: Final = {"Parameters": "Options"}
_MAX_NAME_SHARE: Final = 0.35  # of the width


class HelpFormatter:
    """Implements the protocol of cyclopts' help formatters."""

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: object) -> None:  # noqa: ARG002  # cyclopts' protocol
        """Print the usage line, with the name of a required option instead of its type."""
        line = _TYPED_OPTION.sub(lambda option: f"--{option[1]} {option[1].upper()}", str(usage))
        console.print(f"Usage: {line}", highlight=False, markup=False)

    def render_description(
        self,
        console: "Console",
        options: "ConsoleOptions",  # noqa: ARG002  # cyclopts' protocol
        description: "RenderableType",
    ) -> None:
        """Print the description without the blank line at its end."""
        from rich.text import Text  # noqa: PLC0415  # components start without Rich

        with console.capture() as rendered:
            console.print(description)
        console.print(Text.from_ansi(rendered.get().rstrip()), highlight=False)

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: HelpPanel) -> None:  # noqa: ARG002  # cyclopts' protocol
        """Print a blank line, a heading and the entries of a panel, such as the options."""
        from rich.padding import Padding  # noqa: PLC0415  # components start without Rich
        from rich.table import Table  # noqa: PLC0415  # components start without Rich

        if not panel.entries:
            return
        name_width = int(console.width * _MAX_NAME_SHARE)
        names, meaning = NameRenderer(name_width), DescriptionRenderer()
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=name_width)
        for entry in panel.entries:
            table.add_row(names(entry), meaning(entry))
        title = str(panel.title)
        console.print(f"\n{_TITLES.get(title, title)}:")
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
