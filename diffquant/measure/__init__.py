"""Measurement of language models: tasks, scores and their statistics, fidelity, and sweeps over bit widths."""

from diffquant.recipe import Recipe

# Raise it when a change alters stored results, which are then measured again.
RESULT_VERSION = 1


def can_share_prefixes(recipe: Recipe) -> bool:
    """Return whether several continuations of a prefix can reuse its KV cache under a recipe.

    They cannot if a scale spans several tokens of a sequence, or if a quantized cache keeps its newest tokens
    at 16 bits.
    """
    cached = recipe.schemes_of("k") | recipe.schemes_of("v")
    rounded = recipe.schemes_of("logits") | recipe.schemes_of("qk") | recipe.schemes_of("p")
    rows_only = all(s.is_token_local for s in rounded)
    rows_only &= all(s.granularity in ("", "row") for s in recipe.schemes_of("pv"))
    # The newest tokens (the recipe's residual) stay at 16 bits; once a continuation follows, others are the newest.
    ages = bool(recipe.residual) and any(scheme.quantizes for scheme in cached)
    return rows_only and _by_token(recipe) and not ages


def can_pad_left(recipe: Recipe) -> bool:
    """Return whether left padding leaves a sequence's hidden states unchanged under a recipe.

    It changes them if a scale spans several tokens or rows.
    """
    rounded = recipe.schemes_of("logits") | recipe.schemes_of("qk")
    # Groups of logits, softmax weights and values are neighbouring tokens, counted from the first one.
    counts = any(s.sharing.has_token_groups or any(each.reads == "tile" for each in s.transforms) for s in rounded)
    counts |= has_scales_across_keys(recipe) or any(
        s.granularity in ("group", "block") for s in recipe.schemes_of("pv")
    )
    return _by_token(recipe) and not counts


def has_scales_across_keys(recipe: Recipe) -> bool:
    """Return whether logits or softmax weights of neighbouring keys share a scale.

    Groups of keys that share a scale are counted from the first key, so padding on the left would shift them.
    """
    return any(s.granularity in ("group", "block") for target in ("logits", "p") for s in recipe.schemes_of(target))


def _by_token(recipe: Recipe) -> bool:
    """Return whether each of a cache's scales belongs to one token."""
    cached = recipe.schemes_of("k") | recipe.schemes_of("v")
    return all(scheme.sharing.is_token_local for scheme in cached)
