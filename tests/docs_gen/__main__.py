"""Write the pages into the directory of the first argument, by default `docs`."""

import sys

from gpuledger.codegen import generate
from tests.docs_gen.pages import write_pages

if __name__ == "__main__":
    sys.exit(generate(write_pages, into="docs"))
