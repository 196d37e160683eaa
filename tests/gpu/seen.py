"""What two sequences of the prefill kernels' tests see: queries, keys and masks by what is odd about them."""

import pytest
import torch

from diffquant.family.mask import Mask
from tests.support.kernel_inputs import padding

DEVICE = "cuda"
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SEEN = {
    "causal": (129, 129, Mask()),
    "causal, in whole tiles": (512, 512, Mask()),
    "later part": (17, 1000, Mask()),
    "more queries than keys": (300, 129, Mask()),
    "one query": (1, 100, Mask()),
    "left padding": (300, 300, padding(300, starts=[0, 141], device=DEVICE)),
    "ragged": (500, 500, padding(500, starts=[7, 0], ends=[500, 77], device=DEVICE)),
    "ragged, one empty": (64, 99, padding(99, starts=[3, 20], ends=[90, 20], device=DEVICE)),
}
