"""Examples: programs that use diffquant from outside. Nothing here is in a wheel."""
