"""`gpuledger replay`: runs the join again over ticks that Kafka still keeps."""
