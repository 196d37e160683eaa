"""The wing's tests run as the package's do: one torch thread, no gradients, no device unless named."""

from tests.conftest import (  # noqa: F401
    _imports_are_no_garbage,
    _no_device_unless_named,
    _no_gradients,
    _no_waste_in_the_interpreter,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
    pytest_unconfigure,
)
