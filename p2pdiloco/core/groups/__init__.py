"""Runs larger than one group: seats, partial merges, group inboxes."""
