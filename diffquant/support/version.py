"""The version of this code, which stands here and not in metadata, since a checkout on the path has none."""

__version__ = "0.1.0"

# The version of config.json's `diffquant_config`; a reader refuses what is newer than it knows.
CONFIG_VERSION = 1
