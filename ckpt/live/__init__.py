"""Live state: from the memory of ranks into the memory of others, in any layout, without storage."""
