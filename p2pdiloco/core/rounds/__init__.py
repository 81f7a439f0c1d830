"""A syncer's round: inbox, closing calls, merge, publishing."""
