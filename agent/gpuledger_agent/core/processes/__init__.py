"""The processes on the GPUs, from their first listing to their end, and their use of the GPUs."""
