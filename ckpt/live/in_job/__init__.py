"""Within one job: from the states of some of its ranks into the states of others."""
