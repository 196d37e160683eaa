"""The figures of research/pages/attention-map.md."""

from diffquant.calib.analysis.attention_map_outputs import attention_table
from research.check.numbers import ends
from research.check.page import RESULTS, Page, Unmeasured
from research.studies.results import read_attention_maps

PAGE = Page("research/pages/attention-map.md", guides=("What is measured",))
POCKET, SMOLLM2 = (
    read_attention_maps(RESULTS / folder / "attention-map.json")
    for folder in ("pocket-attention-map", "smollm2-attention-map")
)
PAGE.shows("cd diffquant/data/pocket", list)
PAGE.shows("diffquant attention-map needle-transformer", lambda: attention_table(POCKET).splitlines())
PAGE.shows("diffquant attention-map SmolLM2", lambda: attention_table(SMOLLM2).splitlines())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


_NEEDLE = ("answer", "sentence")
_NOISE = ("others", "prose")


def needle_of_layer(model: int, layer: int) -> float:
    """Percent of a layer's attention that the needle gets, the mean over depths."""
    places = POCKET.models[model].places
    return 100 * mean([sum(place.layers[layer]["share"][part] for part in _NEEDLE) for place in places])


def noise_share(model: int) -> float:
    return 100 * mean([sum(p.overall["share"][part] for part in _NOISE) for p in POCKET.models[model].places])


def signed_noise(model: int) -> float:
    return mean([sum(p.overall["signed"][part] for part in _NOISE) for p in POCKET.models[model].places])


def signed_sum(model: int) -> float:
    return mean([sum(p.overall["signed"].values()) for p in POCKET.models[model].places])


def signed_noise_of_layer(model: int, layer: int) -> float:
    return mean([sum(p.layers[layer]["signed"][part] for part in _NOISE) for p in POCKET.models[model].places])


PAGE.says(
    "the needle gets {} % in the Transformer, {} % in V1 and {} % in V2", *(needle_of_layer(m, 1) for m in range(3))
)
PAGE.says("prose and other needles together: {}, {} and {} %", *map(noise_share, range(3)))
PAGE.says(
    "V1's noise cancels: {} of all weights' {}, in part between its layers ({} and {}), against {} of 1 in the "
    "Transformer and {} of {} in V2",
    signed_noise(1),
    signed_sum(1),
    signed_noise_of_layer(1, 0),
    signed_noise_of_layer(1, 1),
    signed_noise(0),
    signed_noise(2),
    signed_sum(2),
)
_PLACES = SMOLLM2.models[0].places
PAGE.says(
    "It gets the first digit of {} % of the numbers right with {} to {} % of its attention on them",
    100 * mean([place.right for place in _PLACES]),
    *ends(100 * place.overall["share"]["answer"] for place in _PLACES),
)
PAGE.leaves("models of 0.15 M parameters", "a count")
PAGE.table("name | what", Unmeasured("definitions"))
PAGE.table("part | tokens", Unmeasured("definitions"))
