"""What the owner of this machine wants: limits, hours, pauses, and the controls of a running node."""
