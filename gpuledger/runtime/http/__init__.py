"""HTTP servers and clients.

`client` needs aiohttp, which not every component installs, so nothing is imported here.
"""

import sys
from types import ModuleType
from typing import Final

# `import uvicorn` also imports uvicorn's command line, with click and multiprocessing: 1.4 MiB on
# each node for code that is never called. This empty module replaces the command line.
_COMMAND_LINE: Final = ModuleType("uvicorn.main")
vars(_COMMAND_LINE).update(Server=None, main=None, run=None)
sys.modules.setdefault(_COMMAND_LINE.__name__, _COMMAND_LINE)
