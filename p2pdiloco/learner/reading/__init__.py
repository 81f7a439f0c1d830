"""Which samples a learner takes, and its place in them."""
