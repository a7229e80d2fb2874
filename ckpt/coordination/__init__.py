"""How the ranks of a job agree: calls through its key-value store, and who is alive. Moves no tensor bytes."""
