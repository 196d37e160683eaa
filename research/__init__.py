"""Research that the package does not need: its programs, protocols and raw results."""
