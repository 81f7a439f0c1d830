"""Protocol as a state machine: events in, effects out; no clock, no socket, no tensor."""
