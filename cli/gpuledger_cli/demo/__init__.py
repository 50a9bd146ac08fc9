"""`gpuledger demo`: the whole pipeline in one process, on a table that lives."""
