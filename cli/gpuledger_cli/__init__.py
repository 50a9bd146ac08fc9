"""The `gpuledger` command for users. Only it and tests may import several components."""
