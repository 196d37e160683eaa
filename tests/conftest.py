"""One torch thread a test process: tests run side by side, and tiny tensors gain nothing from more."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield
