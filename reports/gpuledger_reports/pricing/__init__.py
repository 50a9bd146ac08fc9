"""Bills: what sums of time cost, by whom, and bills that are closed."""
