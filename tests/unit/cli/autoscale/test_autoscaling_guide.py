"""The manifests of the guide have none of the mistakes that the command finds."""

import re
import textwrap
from pathlib import Path
from typing import Final

import pytest

from gpuledger_cli.__main__ import main
from gpuledger_cli.autoscale.mistakes import MISTAKES

GUIDE: Final = (Path(__file__).parents[4] / "docs" / "guides" / "autoscaling.md").read_text()
BLOCKS: Final = re.findall(r"^ *```yaml\n(.*?)^ *```", GUIDE, re.DOTALL | re.MULTILINE)


def test_no_mistake_is_found_in_the_guide_also_on_shared_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "guide.yaml"
    file.write_text("---\n".join(map(textwrap.dedent, BLOCKS)))

    assert main(["autoscale", "check", "--shared-gpus", str(file)]) == 0
    assert capsys.readouterr().out == "4 autoscalers: no mistakes found\n"


def test_the_guides_example_of_a_mistake_has_the_commands_words() -> None:
    name = re.findall(r"^-:\d+: ScaledObject serving/chat: (\S+)$", GUIDE, re.MULTILINE)
    (mistake,) = [one for one in MISTAKES if [one.name] == name]
    assert f"\n  {mistake.problem}\n  Fix: {mistake.fix}\n" in GUIDE
