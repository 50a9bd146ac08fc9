"""From a tick to the broker, in order: the queue, the spool on disk, the loop that publishes."""
