"""A learner's contributions until they are merged beyond doubt."""
