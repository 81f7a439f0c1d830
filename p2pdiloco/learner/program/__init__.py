"""Learner of a program with a training loop of its own (`p2pdiloco.Session`)."""
