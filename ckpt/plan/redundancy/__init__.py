"""Who keeps second copies of what: placement of copies on failure domains, and ranks that write what others write, too. Pure."""
