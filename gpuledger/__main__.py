"""`python -m gpuledger` is `gpuledger`."""

import sys

from gpuledger.programs import main

if __name__ == "__main__":
    sys.exit(main())
