"""References to an earlier checkpoint: which chunks of a save are in its base, and how the leader writes them down."""
