"""Bills: the cost of summed times by tenant, and closed bills."""
