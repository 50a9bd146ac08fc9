"""The GPUs of a node, asked each tick: threads, deadlines and breakers that know no vendor."""
