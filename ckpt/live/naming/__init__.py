"""Names of a live state: translations of its tensors into other conventions, and what messages call it."""
