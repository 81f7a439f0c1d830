"""`p2pdiloco demo`: a swarm trains, and loses a syncer."""
