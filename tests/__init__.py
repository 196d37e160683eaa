"""What only a CUDA device can show. A package, so that `tests/` is importable without its conftest."""
