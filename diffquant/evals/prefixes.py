"""Which recipes let sequences share a prefix, and which take padding: for every model, whatever runs it. No torch."""

from diffquant.recipe import Recipe


def shares_prefixes(recipe: Recipe) -> bool:
    """Whether a prefix computed once serves every continuation: no scale may span tokens of a sequence."""
    cached = recipe.schemes_of("k") | recipe.schemes_of("v")
    rounded = recipe.schemes_of("logits") | recipe.schemes_of("qk")
    rows_only = all(s.sharing.by_token and not s.smooth for s in rounded)
    # The newest tokens of a context are old ones once a continuation follows.
    ages = bool(recipe.residual) and any(scheme.quantizes for scheme in cached)
    return rows_only and _by_token(recipe) and not ages


def takes_padding(recipe: Recipe) -> bool:
    """Whether padding before a sequence leaves its states as they are: no scale may span so many tokens or rows."""
    rounded = recipe.schemes_of("logits") | recipe.schemes_of("qk")
    # A group of logits is of neighbouring keys, which are counted from the first.
    counts = any(s.sharing.counts_tokens for s in rounded) or any(
        s.granularity == "group" for s in recipe.schemes_of("logits")
    )
    return _by_token(recipe) and not counts


def _by_token(recipe: Recipe) -> bool:
    """Whether each of a cache's scales is of one token."""
    cached = recipe.schemes_of("k") | recipe.schemes_of("v")
    return all(scheme.sharing.by_token for scheme in cached)
