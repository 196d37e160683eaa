"""The version of this code. It is here and not in metadata, since a checkout on the path has no metadata."""

__version__ = "0.1.0"

# The version of config.json's `diffquant_config`; readers refuse a newer one.
CONFIG_VERSION = 1
