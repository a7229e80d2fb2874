"""From a checkpoint into a state: open, plan, read, exchange, check."""
