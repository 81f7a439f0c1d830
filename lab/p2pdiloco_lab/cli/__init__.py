"""Commands of the lab: `p2pdiloco simulate` and `p2pdiloco chaos`."""
