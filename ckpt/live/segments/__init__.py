"""Memory of one rank that holds its part of a version, and how other processes of its machine read it."""
