"""The GPUs of a node, queried each tick: threads, deadlines and breakers that know no vendor."""
