"""DiffTransformer, its caches, and the adapters that read source formats into it."""
