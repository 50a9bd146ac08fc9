"""HTTP on both sides: the pages that are served, and the answers of servers that are asked.

`client` needs aiohttp, which not every deployable carries, so nothing is imported here.
"""

import sys
from types import ModuleType
from typing import Final

# `import uvicorn` imports its command line as well, with click and multiprocessing: 1.4 MiB on each
# node for what is never called. An empty module stands for it.
_COMMAND_LINE: Final = ModuleType("uvicorn.main")
vars(_COMMAND_LINE).update(Server=None, main=None, run=None)
sys.modules.setdefault(_COMMAND_LINE.__name__, _COMMAND_LINE)
