"""Groups of runs that are larger than one: seats, partial merges, group inboxes."""
