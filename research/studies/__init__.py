"""Experiments behind the pages in docs/: programs to run from a checkout, not part of the package."""
