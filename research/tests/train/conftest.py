"""Trainings need gradients, which tests are run without."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _gradients():
    with torch.enable_grad():
        yield
