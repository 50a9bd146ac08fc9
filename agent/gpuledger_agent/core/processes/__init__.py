"""Whose the processes on the GPUs are, from the first listing to the end of each."""
