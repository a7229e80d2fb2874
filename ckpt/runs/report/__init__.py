"""What the spans of saves say, and how it is drawn. Nothing here writes to a checkpoint, and nothing imports torch."""
