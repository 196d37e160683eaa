"""Pages of results: a template for each, and the module that computes its figures from raw files."""
