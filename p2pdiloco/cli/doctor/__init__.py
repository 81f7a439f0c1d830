"""`p2pdiloco doctor`: what is wrong with this machine, or between it and a run."""
