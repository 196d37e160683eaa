"""The search for the bit widths that cost least under a budget."""
