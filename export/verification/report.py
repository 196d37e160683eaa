"""The result of a verification: errors with their limits, by session and route (see `iterate_routes`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from diffquant.onnx.verification.errors import StageErrors
from diffquant.onnx.verification.tokens import TokenComparison
from diffquant.support.names import option_name
from diffquant.support.terminal import PrintableResult


@dataclass(frozen=True)
class Measure:
    """A measured number and its limit.

    Attributes:
        value: measured number.
        limit: largest allowed value.
    """

    value: float
    limit: float

    @property
    def passed(self) -> bool:
        # False for NaN, too.
        return self.value <= self.limit

    @property
    def ratio(self) -> float:
        """The value divided by the limit.

        If the limit is 0, the ratio is 0 for a value of 0, and infinite for any other. It is infinite if the value is
        NaN.
        """
        if self.limit == 0 or self.value != self.value:
            return 0.0 if self.value == 0 else float("inf")
        return self.value / self.limit

    def __str__(self) -> str:
        return f"{self.value:.1e} {'of' if self.passed else '>'} {self.limit:.0e}"


@dataclass(frozen=True)
class RouteErrors:
    """Errors of one route, a way to feed passages to a session.

    Outputs are compared with those of the torch reference, and with those of the session's prefill.

    Attributes:
        session: name of the session.
        name: name of the route, such as "prefill" or "decode".
        typical: each stage's median error over the positions; empty if only logits were compared.
        largest: each stage's largest error over the positions; empty if only logits were compared.
        logits: relative RMS error of the logits of whole runs, or None if only stages were compared.
        against_prefill: relative RMS difference of the logits from prefill's, or None if these may differ.
    """

    session: str
    name: str
    typical: tuple[Measure, ...]
    largest: tuple[Measure, ...]
    logits: Measure | None
    against_prefill: Measure | None

    @property
    def logit_measures(self) -> tuple[Measure, ...]:
        """`logits` and `against_prefill`, without those that are None."""
        return tuple(each for each in (self.logits, self.against_prefill) if each is not None)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """All measured errors."""
        return (*self.typical, *self.largest, *self.logit_measures)

    @property
    def passed(self) -> bool:
        return all(measure.passed for measure in self.measures)

    def stages_out_of_tolerance(self) -> Iterator[int]:
        """Yield the indices of the stages whose median or largest error exceeds its limit, in order."""
        for number, of_stage in enumerate(zip(self.typical, self.largest, strict=True)):
            if not all(measure.passed for measure in of_stage):
                yield number


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification(PrintableResult):
    """Result of comparing an exported folder with its checkpoint.

    Attributes:
        folder: folder that was verified.
        passages: number of test passages.
        positions: number of tokens in the passages.
        reached: number of the context's positions that were tested with single tokens.
        stages: names of the stages in order.
        routes: errors of every route in every session.
        cache: ratio of the quantized cache's median rounding error to the error under scales fitted to the passages, in
            the layer with the largest ratio, or None if the cache has the activations' type.
        cache_layer: index of the layer with the largest ratio.
        cache_clips: whether keys or values in `cache_layer` exceed the largest code.
        scales: largest relative difference of the cache's scales from calibrated ones, or None if the cache is not
            quantized or its calibration is not recorded.
        rotation: error of the RoPE tables divided by the error that rounding explains, or None if nothing is rotated.
        failures: sentences on routes that ONNX Runtime cannot run, with its errors.
        bodies: sentences on nodes whose attributes differ from their function bodies. Such a node computes something
            else with the native library than without it.
        tokens: next-token predictions of prefill compared with the float32 reference's, by session.
        notes: sentences for the user.
    """

    folder: Path
    passages: int
    positions: int
    reached: int
    stages: tuple[str, ...]
    routes: tuple[RouteErrors, ...]
    cache: Measure | None
    cache_layer: int
    cache_clips: bool
    scales: Measure | None
    rotation: Measure | None
    failures: tuple[str, ...]
    bodies: tuple[str, ...]
    tokens: Mapping[str, TokenComparison]
    notes: tuple[str, ...]

    @property
    def measures(self) -> list[Measure]:
        """All measured errors."""
        of_routes = (measure for route in self.routes for measure in route.measures)
        return [each for each in (*of_routes, self.cache, self.scales, self.rotation) if each is not None]

    @property
    def passed(self) -> bool:
        return not self.failures and not self.bodies and all(each.passed for each in self.measures)

    @property
    def largest_ratio(self) -> float:
        """Largest ratio of an error to its limit; infinite if an error is NaN."""
        return max((each.ratio for each in self.measures), default=0.0)

    def to_dict(self) -> dict[str, object]:
        return {"passed": self.passed, "verdict": self.verdict(), **asdict(self)}

    def verdict(self) -> str:
        """Return one line: PASS and what was compared, or FAIL and where the folder first exceeds a limit."""
        if not self.passed:
            return f"FAIL: {self.folder}: {self.describe_first_failure()}"
        return (
            f"PASS: {len(self.stages)} stages at {self.positions} positions by {len(self.routes)} routes; "
            f"largest error {self.largest_ratio:.0%} of its limit"
        )

    def __str__(self) -> str:
        return "\n".join([self.verdict(), *self.notes, *self.failures, *self.bodies])

    def table(self) -> str:
        """Return a table of every route with its errors and limits, and of the effect on next-token predictions."""
        lines = [
            f"{self.positions} positions in {self.passages} passages, single tokens up to position {self.reached:,}",
            "relative errors, and each as a share of its limit",
            _HEADER,
        ]
        for session, routes in groupby(self.routes, attrgetter("session")):
            lines += [session, *map(_row, routes)]
        if self.cache is not None:
            lines.append(f"cache: {self._cache_fit(self.cache)}")
        if self.scales is not None:
            lines.append(
                f"cache: scales within {self.scales.value:.1%} of calibration's (limit {self.scales.limit:.0%})"
            )
        lines += [f"{session}: {tokens}" for session, tokens in self.tokens.items()]
        return "\n".join(lines)

    def describe_first_failure(self) -> str:
        """Describe the first failed check, with stages first, in order, and then logits, RoPE tables and cache."""
        stages = [(number, route) for route in self.routes for number in route.stages_out_of_tolerance()]
        if stages:
            number, route = min(stages, key=lambda found: found[0])
            error = worst_measure((route.typical[number], route.largest[number]))
            return f"diverges first in {self.stages[number]} ({route.session}, {route.name}: {error})"
        wrong = [
            f"{route.session}, {route.name} ({worst_measure(route.logit_measures)})"
            for route in self.routes
            if not route.passed
        ]
        if wrong:
            return f"has every stage within its tolerance; the logits of whole runs are not: {'; '.join(wrong)}"
        if self.rotation is not None and not self.rotation.passed:
            return f"has RoPE tables that differ from the model's ({self.rotation} roundings)"
        if self.scales is not None and not self.scales.passed:
            off, most = self.scales.value, self.scales.limit
            return f"KV-cache scales differ from calibration's: {off:.1%} off (limit {most:.0%})"
        if self.cache is not None and not self.cache.passed:
            return self._misfit(self.cache)
        if self.failures:
            return f"does not run on every route: {self.failures[0]}"
        return f"computes something else with the native library than without it: {self.bodies[0]}"

    def _misfit(self, cache: Measure) -> str:
        """Describe a cache with poor scales: calibration data that is unlike the text, or scales of unknown origin."""
        if self.scales is None:
            return f"KV-cache scales do not fit the model in {self._cache_fit(cache)}; export it again"
        found, text = ("narrow", "more text") if self.cache_clips else ("wide", "other text")
        return (
            f"KV-cache calibration is too {found} in {self._cache_fit(cache)}; recalibrate on {text} "
            f"(diffquant calibrate, then export with {option_name('scales')}) or export with {option_name('kv', 16)}"
        )

    def _cache_fit(self, cache: Measure) -> str:
        return f"layer {self.cache_layer}: {cache.value:.3g}x the error of fitted scales (limit {cache.limit:g}x)"


# Limit of an error, as a multiple of the error that rounding alone causes in the reference.
MARGIN = 4.0


def measure_stages(
    errors: StageErrors, typical: Sequence[float], largest: float
) -> tuple[tuple[Measure, ...], tuple[Measure, ...]]:
    """Return the stages' median and largest errors, each with `MARGIN` times the noise as its limit.

    Args:
        errors: errors at some positions.
        typical: for each stage, the noise to compare its median error with.
        largest: noise to compare the largest error of every stage with.
    """
    medians = zip(errors.quantile(0.5), typical, strict=True)
    return (
        tuple(Measure(value, MARGIN * limit) for value, limit in medians),
        tuple(Measure(value, MARGIN * largest) for value in errors.largest),
    )


def worst_measure(of: Sequence[Measure]) -> Measure:
    """Return the measure with the largest ratio of value to limit."""
    return max(of, key=lambda measure: measure.ratio)


# 80 columns.
_ROW = " {:15} {:14}  {:14}  {:14}  {}"
_HEADER = _ROW.format("", "stage, typical", "stage, largest", "logits", "against prefill")


def _row(route: RouteErrors) -> str:
    stages = [worst_measure(errors) if errors else None for errors in (route.typical, route.largest)]
    cells = [
        f"{each.value:.1e} {each.ratio:>4.0%}" if each else ""
        for each in (*stages, route.logits, route.against_prefill)
    ]
    return _ROW.format(route.name, *cells).rstrip()
