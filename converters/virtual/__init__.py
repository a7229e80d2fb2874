"""Virtual checkpoints: a checkpoint of any format as an index that points into its files. No torch."""
