"""Makes `python -m gpuledger` the same as `gpuledger`."""

import sys

from gpuledger.programs import main

if __name__ == "__main__":
    sys.exit(main())
