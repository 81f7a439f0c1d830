"""A learner of several processes on one machine."""
