"""The `gpuledger` command for people. Besides tests, only it may import several deployables."""
