"""The version of this code, which stands here and not in metadata, since a checkout on the path has none."""

__version__ = "0.1.0"
