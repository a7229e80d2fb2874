"""Text for people: sizes, times and shapes, and names of others made safe for a terminal."""
