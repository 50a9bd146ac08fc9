"""The real parts are built from the versions that the module files pin."""

import pytest

from tests.tools import catalogue, go_modules

GO_TOOLS = [
    tool
    for tool in (*catalogue.TOOLS, *catalogue.EXTENDED_TOOLS)
    if isinstance(tool, go_modules.GoTool)
]


@pytest.mark.parametrize("tool", GO_TOOLS, ids=lambda tool: tool.name)
def test_a_go_part_is_named_by_the_version_in_its_go_mod(tool: go_modules.GoTool) -> None:
    module = go_modules.SOURCES / tool.module
    assert f" v{tool.version}" in (module / "go.mod").read_text()
    assert f" v{tool.version} " in (module / "go.sum").read_text()


@pytest.mark.parametrize("tool", GO_TOOLS, ids=lambda tool: tool.name)
def test_the_go_version_that_a_part_needs_is_read_from_its_go_mod(tool: go_modules.GoTool) -> None:
    assert go_modules.needed_go(go_modules.SOURCES / tool.module).startswith("1.")
