"""`gpuledger standalone`: the whole pipeline in one process, for one machine, without Kafka."""
