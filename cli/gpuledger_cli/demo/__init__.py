"""`gpuledger demo`: the whole pipeline in one process, shown as a live table."""
