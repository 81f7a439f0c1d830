"""`p2pdiloco simulate --bulk`: the daemon's bulk code in worlds of virtual time."""
