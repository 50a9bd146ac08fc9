"""The processes on the GPUs: their identity from the first listing to the end, and their use."""
