"""Search for the bit widths with the least accuracy loss under a size budget."""
