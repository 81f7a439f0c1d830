"""`p2pdiloco chaos`: a swarm under a schedule of faults."""
