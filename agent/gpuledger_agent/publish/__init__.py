"""Publishing: the send queue, the on-disk spool, and the loop that sends both in order."""
