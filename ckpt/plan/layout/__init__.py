"""Where the elements of a tensor are: boxes, meshes, placements, and rules from names to placements. No torch, no I/O."""
