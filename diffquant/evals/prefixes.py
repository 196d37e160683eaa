"""Which recipes allow sequences to share a prefix, and which allow padding, for any runtime. No torch here."""

from diffquant.recipe import Recipe


def shares_prefixes(recipe: Recipe) -> bool:
    """Whether continuations can reuse a computed prefix: no scale may span tokens of a sequence."""
    cached = recipe.schemes_of("k") | recipe.schemes_of("v")
    rounded = recipe.schemes_of("logits") | recipe.schemes_of("qk") | recipe.schemes_of("p")
    rows_only = all(s.sharing.by_token and not s.smooth and not s.smoothq for s in rounded)
    rows_only &= all(s.granularity in ("", "row") for s in recipe.schemes_of("pv"))
    # Tokens in the residual of a context are no longer the newest once a continuation follows.
    ages = bool(recipe.residual) and any(scheme.quantizes for scheme in cached)
    return rows_only and _by_token(recipe) and not ages


def takes_padding(recipe: Recipe) -> bool:
    """Whether left padding leaves a sequence's states unchanged: no scale may span several tokens or rows."""
    rounded = recipe.schemes_of("logits") | recipe.schemes_of("qk")
    # Groups of logits, weights and values are neighbouring tokens, counted from the first one.
    counts = any(s.sharing.counts_tokens or s.smoothq for s in rounded)
    counts |= counts_keys(recipe) or any(s.granularity in ("group", "block") for s in recipe.schemes_of("pv"))
    return _by_token(recipe) and not counts


def counts_keys(recipe: Recipe) -> bool:
    """Whether neighbouring keys share a scale of logits or softmax weights, in groups from the first key on."""
    return any(s.granularity in ("group", "block") for target in ("logits", "p") for s in recipe.schemes_of(target))


def _by_token(recipe: Recipe) -> bool:
    """Whether each of a cache's scales is of one token."""
    cached = recipe.schemes_of("k") | recipe.schemes_of("v")
    return all(scheme.sharing.by_token for scheme in cached)
