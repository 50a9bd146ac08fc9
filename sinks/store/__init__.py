"""The long-term store: one row an entry in a Delta Lake table, with the offsets in the commit."""
