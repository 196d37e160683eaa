"""The parts of a verification against what nobody here wrote."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from diffquant.export.verification.activations import keep, round_by_block, round_by_row, runtime_rounding
from diffquant.export.verification.errors import relative_rms
from diffquant.export.verification.tokens import compare_tokens


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_rule_by_which_the_runtime_rounds_activations_is_found(bits, block):
    assert runtime_rounding(bits, block) in (round_by_block, round_by_row, keep)


def test_activations_are_rounded_to_127_steps_of_their_blocks_largest():
    x = torch.tensor([[127.0, 1.4, -0.6, 0.5, 12.7, 0.04, -0.06]])
    expected = torch.tensor([[127.0, 1.0, -1.0, 0.0, 12.7, 0.0, -0.1]])
    torch.testing.assert_close(round_by_block(x, 4), expected)
    torch.testing.assert_close(round_by_row(x, 4), torch.tensor([[127.0, 1.0, -1.0, 0.0, 13.0, 0.0, 0.0]]))
    assert not round_by_block(torch.zeros(2, 5), 4).any()


def test_divergences_are_scipys():
    logits = torch.randn(2, 1, 9, 11, generator=torch.Generator().manual_seed(0))
    compared = compare_tokens([(logits[0], logits[1])])
    reference, model = (x[0].softmax(-1).double().numpy() for x in logits)
    divergences = entropy(reference, model, axis=-1)
    assert compared.kl_mean == pytest.approx(divergences.mean(), rel=1e-5)
    assert compared.kl_largest == pytest.approx(divergences.max(), rel=1e-5)
    assert compared.agreement == (reference.argmax(-1) == model.argmax(-1)).mean()


def test_an_error_is_relative_to_the_spread_of_the_logits():
    wanted = torch.tensor([[[10.0, 12.0], [8.0, 12.0]]])
    assert relative_rms([(wanted + 1, wanted)]) == pytest.approx(np.sqrt(4 / 10))
