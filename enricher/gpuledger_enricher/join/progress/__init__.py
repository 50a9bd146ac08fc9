"""When: how far nodes are booked, what is late, what no tick covers, what shows of the clocks."""
