"""History of a run, kept by whoever wants: written with every version, fetched and given to anybody."""
