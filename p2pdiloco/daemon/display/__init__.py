"""Display of a node for people: snapshot, terminal view, log lines."""
