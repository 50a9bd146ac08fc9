"""`python -m gpuledger NAME …`: runs a program's module by its name, as `python -m NAME …` would.

For the modules that have no console script, such as `simulator`: where the wheel is installed,
Python does not find them by itself (`gpuledger.programs`).
"""

import runpy
import sys

from gpuledger.programs import find_programs


def main() -> None:
    """Run the module that the first argument names; exit code 2 where there is none."""
    find_programs()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if not name or name.startswith("-"):
        sys.stderr.write(
            "usage: python -m gpuledger NAME …, such as simulator; for people: gpuledger\n"
        )
        sys.exit(0 if name in ("-h", "--help") else 2)
    del sys.argv[1]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ImportError as error:
        # runpy's own, of the module itself: what the module fails to import has a traceback.
        if error.__cause__ is None and error.name is None:
            sys.stderr.write(f"gpuledger: {error}; name a module such as simulator\n")
            sys.exit(2)
        raise


if __name__ == "__main__":
    main()
