"""Progress in time: the booked time of nodes, lateness, gaps, watermarks and clock differences."""
