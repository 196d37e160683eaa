"""The protocol of loss by position: the NLL of a token given how many tokens precede it.

A text is read in windows that do not overlap, so a window's n-th prediction has n tokens before it; the running mean is
the cumulative average NLL of arXiv 2410.05258, figure 4. A token is an AR-hit (associative recall) if it completes a
bigram that occurred earlier in its window. Table 6 there separates such tokens from the others, after Arora et al.,
arXiv 2312.04927, who also exclude the commonest bigrams of the training data, which we do not know.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.evals.defaults import BATCH_TOKENS, WINDOW
from diffquant.evals.language_model import LanguageModel, require_finite
from diffquant.evals.scoring import token_scores
from diffquant.support.progress import Progress, silent
from diffquant.text.tokens import encode_text


@torch.inference_mode()
def score_positions(
    model: LanguageModel,
    text: str,
    window: int = WINDOW,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods of a text's tokens, in windows of one length; an incomplete last window is skipped.

    Returns:
        float64 [N, W] in nats: for each of N windows, the n-th prediction, made from n tokens; bool [N, W]: whether the
        predicted token completes a bigram that occurred earlier in its window.

    Raises:
        UsageError: the text or the window is too short.
        NonFiniteError: the model's logits are not finite.
    """
    tokens = encode_text(model.tokenizer, text, model.vocabulary, model.device)
    window = min(window, len(tokens) - 1, model.max_length)
    if window < 2:
        raise UsageError(f"nll needs windows of 2 tokens or more, got {window}")
    windows = tokens[: (len(tokens) - 1) // window * window].view(-1, window)
    # The token after a window is predicted, never read.
    targets = tokens[1 : windows.numel() + 1].view(-1, window)
    nll = torch.empty(windows.shape, dtype=torch.float64)
    rows = max(1, batch_tokens // window)
    for first in range(0, len(windows), rows):
        states = model.read(windows[first : first + rows])
        for row, wanted in enumerate(targets[first : first + rows]):
            nll[first + row] = -token_scores(states[row], wanted[:, None])[0].flatten().double()
        progress(min(first + rows, len(windows)) * window, windows.numel(), "reading")
    require_finite(nll)
    both = zip(windows.tolist(), targets.tolist(), strict=True)
    return nll, torch.tensor([recalls([*seen, wanted[-1]]) for seen, wanted in both])


def cumulative_means(nll: Tensor) -> tuple[list[int], Tensor]:
    """Means of each window's first predictions, given float64 [N, W].

    Returns:
        How many predictions: P powers of two up to the window, and the window; float64 [N, P].
    """
    window = nll.shape[1]
    positions = sorted({*(2**power for power in range(window.bit_length())), window})
    means = nll.cumsum(1) / torch.arange(1, window + 1)
    return positions, means[:, [position - 1 for position in positions]]


def recalls(ids: Sequence[int]) -> list[bool]:
    """Whether each token after the first completes a bigram that occurred earlier."""
    seen: set[tuple[int, int]] = set()
    hits = []
    for bigram in pairwise(ids):
        hits.append(bigram in seen)
        seen.add(bigram)
    return hits
