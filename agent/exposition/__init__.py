"""What the node shows on `/metrics`: its GPUs, containers and processes, from records alone."""
