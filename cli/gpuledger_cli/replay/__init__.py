"""`gpuledger replay`: the join once more over ticks that are still kept."""
