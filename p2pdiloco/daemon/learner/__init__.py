"""The daemon's side of the learner process: start, talk, watch, end."""
