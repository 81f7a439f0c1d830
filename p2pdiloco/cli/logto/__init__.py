"""`p2pdiloco log-to`: figures of the event log, in somebody else's charts."""
