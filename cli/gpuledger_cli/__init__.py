"""The `gpuledger` command for users. Only this package and tests may import several components."""
