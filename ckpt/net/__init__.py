"""What goes between processes: sockets and shared memory, the job's key-value store, and how ranks agree (``call``)."""
