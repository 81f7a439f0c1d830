"""Credits: who trained how much of a run, from the labels that learners signed, kept for the whole run."""
