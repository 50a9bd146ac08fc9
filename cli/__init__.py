"""The `gpuledger` command for people. With the tests, the only one to import several deployables."""
