"""Who the processes on the GPUs are: `/proc`, cgroup paths, the table of their lives."""
