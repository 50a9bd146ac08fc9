"""`gpuledger dead-letters`: lists, shows and replays rejected records."""
