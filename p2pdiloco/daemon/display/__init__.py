"""What a person sees of a node: snapshot, terminal view, log lines."""
