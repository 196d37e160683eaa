"""Text that models read, and its tokens."""
