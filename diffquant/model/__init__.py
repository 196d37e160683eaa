"""The model classes, their caches, and the adapters that convert source formats to them."""

# Increase it if a change alters stored results, which must then be measured again.
RESULT_VERSION = 1
