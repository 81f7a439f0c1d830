"""`p2pdiloco credits`: who did how much of a run, checked by whoever asks; and certificates of it."""
