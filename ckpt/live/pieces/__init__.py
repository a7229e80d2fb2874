"""What goes between two ranks: the messages of a pull, and pieces that hold only what changed. No torch."""
