"""`p2pdiloco demo`: real nodes as processes train, lose a syncer, and their event logs are judged."""
