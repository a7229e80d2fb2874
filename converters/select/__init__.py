"""What of a checkpoint is taken: its tensors, under which names and in which dtype, and a state that fits them. No torch."""
