"""What a Checkpointer reports while it works: events, their listeners, alerts."""
