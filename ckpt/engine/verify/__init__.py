"""Whether a checkpoint is what its digests say."""
