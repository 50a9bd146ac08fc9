"""Progress in time: how far nodes are booked, lateness, gaps, watermarks and clock differences."""
