"""`p2pdiloco top`: the whole swarm, live, as several members see it."""
