"""Measurements of a verification: numbers with their limits, by session and route."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from diffquant.export.verification.errors import StageErrors, StageNoise
from diffquant.export.verification.tokens import TokenComparison
from diffquant.support.readable import Readable


@dataclass(frozen=True)
class Measure:
    """A measured number and its limit.

    Attributes:
        value: number that was measured.
        limit: largest number allowed.
    """

    value: float
    limit: float

    @property
    def passed(self) -> bool:
        # False for NaN, too.
        return self.value <= self.limit

    @property
    def ratio(self) -> float:
        """Value over limit; infinite where a NaN was measured, or anything where nothing is allowed."""
        if self.limit == 0 or self.value != self.value:
            return 0.0 if self.value == 0 else float("inf")
        return self.value / self.limit

    def __str__(self) -> str:
        return f"{self.value:.1e} {'of' if self.passed else '>'} {self.limit:.0e}"


@dataclass(frozen=True)
class Route:
    """One way of running the passages in one session, against torch and against the session's prefill.

    Attributes:
        session: name of the session.
        name: name of the route.
        typical: median error over the positions of what a stage makes of its input, by stage; empty where only logits
            were seen.
        largest: largest such error over the positions, by stage.
        logits: relative RMS error of the logits of whole runs; None where only stages were compared.
        against_prefill: relative RMS difference of the logits from prefill's; None if they may differ.
    """

    session: str
    name: str
    typical: tuple[Measure, ...]
    largest: tuple[Measure, ...]
    logits: Measure | None
    against_prefill: Measure | None

    @property
    def of_logits(self) -> tuple[Measure, ...]:
        """The measures of the logits that there are."""
        return tuple(each for each in (self.logits, self.against_prefill) if each is not None)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """All that was measured."""
        return (*self.typical, *self.largest, *self.of_logits)

    @property
    def passed(self) -> bool:
        return all(measure.passed for measure in self.measures)

    def stages_out_of_tolerance(self) -> Iterator[int]:
        """Numbers of the stages that leave their tolerance, in order."""
        for number, of_stage in enumerate(zip(self.typical, self.largest, strict=True)):
            if not all(measure.passed for measure in of_stage):
                yield number


@dataclass(frozen=True)
class SessionTokens:
    """Next tokens that a session's prefill predicts, against the reference with float32 products.

    Attributes:
        session: name of the session.
        tokens: comparison with the reference.
    """

    session: str
    tokens: TokenComparison


def loses_tokens(sessions: Sequence[SessionTokens]) -> bool:
    """Whether the first session's likeliest tokens agree with the reference less often than the second's."""
    return len(sessions) > 1 and sessions[0].tokens.agreement < sessions[1].tokens.agreement


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification(Readable):
    """How an exported folder compares with its checkpoint.

    Attributes:
        folder: folder that was verified.
        passages: number of passages that were read.
        positions: number of their tokens.
        reached: number of the context's positions that single tokens reached.
        stages: names of the stages in order.
        routes: every way of running the folder.
        cache: typical rounding of the quantized cache against that under scales fitted to the passages; None for a
            cache in the activations' type.
        scales: largest relative difference of the cache's scales from those that calibration found; None where the
            folder has no record of it.
        rotation: how far cosines and sines are off, in parts of what their rounding explains; None without a rotation.
        failures: routes that ONNX Runtime cannot run, with its error.
        bodies: nodes whose attributes are not those of their function bodies: with the native library such a node
            computes something else than without it.
        tokens: what the differences do to next tokens, by session.
        notes: sentences that a reader should know.
    """

    folder: Path
    passages: int
    positions: int
    reached: int
    stages: tuple[str, ...]
    routes: tuple[Route, ...]
    cache: Measure | None
    scales: Measure | None
    rotation: Measure | None
    failures: tuple[str, ...]
    bodies: tuple[str, ...]
    tokens: tuple[SessionTokens, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        beside = (self.cache, self.scales, self.rotation)
        return (
            not self.failures
            and not self.bodies
            and all(each.passed for each in (*self.routes, *beside) if each is not None)
        )

    @property
    def largest_share(self) -> float:
        """The largest part of its limit that any number takes; infinite where a NaN was measured."""
        beside = (self.cache, self.scales, self.rotation)
        routes = (measure for route in self.routes for measure in route.measures)
        return max((each.ratio for each in (*routes, *beside) if each is not None), default=0.0)

    def to_dict(self) -> dict[str, object]:
        return {"passed": self.passed, "verdict": self.verdict(), **asdict(self)}

    def verdict(self) -> str:
        """PASS or FAIL, with what was proved or where the folder first leaves its tolerance."""
        if not self.passed:
            return f"FAIL: {self.folder} {self.divergence()}"
        return (
            f"PASS: {len(self.stages)} stages at {self.positions} positions by {len(self.routes)} routes; "
            f"largest error {self.largest_share:.0%} of its limit"
        )

    def __str__(self) -> str:
        return "\n".join([self.verdict(), *self.notes, *self.failures, *self.bodies])

    def table(self) -> str:
        """Every route with its errors and limits, and what they do to next tokens."""
        lines = [
            f"{self.positions} positions in {self.passages} passages, single tokens up to position {self.reached:,}",
            "relative errors, and how much of its limit each takes",
            _HEADER,
        ]
        for session, routes in groupby(self.routes, attrgetter("session")):
            lines += [session, *map(_row, routes)]
        if self.cache is not None:
            lines.append(
                f"cache: rounds {self.cache.value:.1f} times as much as scales fitted to these passages would "
                f"(limit {self.cache.limit:g})"
            )
        if self.scales is not None:
            lines.append(
                f"cache: scales within {self.scales.value:.1%} of calibration's (limit {self.scales.limit:.0%})"
            )
        lines += [f"{each.session}: {each.tokens}" for each in self.tokens]
        return "\n".join(lines)

    def divergence(self) -> str:
        """Describe where the folder first leaves its tolerance, as a sentence without its subject."""
        stages = [(number, route) for route in self.routes for number in route.stages_out_of_tolerance()]
        if stages:
            number, route = min(stages, key=lambda found: found[0])
            error = nearest_limit((route.typical[number], route.largest[number]))
            return f"diverges first in {self.stages[number]} ({route.session}, {route.name}: {error})"
        wrong = [
            f"{route.session}, {route.name} ({nearest_limit(route.of_logits)})"
            for route in self.routes
            if not route.passed
        ]
        if wrong:
            return f"has every stage within its tolerance; the logits of whole runs are not: {'; '.join(wrong)}"
        if self.rotation is not None and not self.rotation.passed:
            return f"rotates by cosines and sines that are not the model's ({self.rotation} roundings)"
        if self.scales is not None and not self.scales.passed:
            return f"has scales of the quantized cache that are not those that calibration found ({self.scales})"
        if self.cache is not None and not self.cache.passed:
            return f"has scales of the quantized cache that do not fit the model ({self.cache})"
        if self.failures:
            return f"does not run by every route: {self.failures[0]}"
        return f"computes something else with the native library than without it: {self.bodies[0]}"


def measures(
    errors: StageErrors, noise: StageNoise, firsts: Sequence[int], margin: float
) -> tuple[tuple[Measure, ...], tuple[Measure, ...]]:
    """Typical and largest errors of the stages, with what `margin` times the noise allows.

    Args:
        errors: errors at the positions of some passages, from first ones on.
        noise: errors that rounding explains.
        firsts: first position of each passage.
        margin: factor of the noise.
    """
    typical, largest = zip(errors.quantile(0.5), noise.typical(firsts), strict=True), noise.largest
    return (
        tuple(Measure(value, margin * limit) for value, limit in typical),
        tuple(Measure(value, margin * largest) for value in errors.largest),
    )


def far_measures(
    errors: StageErrors, noise: StageNoise, usual: StageNoise, margin: float
) -> tuple[tuple[Measure, ...], tuple[Measure, ...]]:
    """Typical and largest errors of the stages in a few calls that were read alike, with their limits.

    Args:
        errors: errors of the calls.
        noise: errors that rounding explains in these very calls.
        usual: errors that it explains in passages, among whose many positions a code more often flips.
        margin: factor of the noise.
    """
    typical = zip(errors.quantile(0.5), noise.flipped.quantile(0.9), strict=True)
    largest = max(noise.largest, usual.largest)
    return (
        tuple(Measure(value, margin * limit) for value, limit in typical),
        tuple(Measure(value, margin * largest) for value in errors.largest),
    )


def nearest_limits(of: Sequence[Sequence[Measure]]) -> tuple[Measure, ...]:
    """Stage by stage, the measure that is nearest to its limit."""
    return tuple(map(nearest_limit, zip(*of, strict=True)))


def nearest_limit(of: Sequence[Measure]) -> Measure:
    """The measure that is nearest to its limit, or farthest beyond it."""
    return max(of, key=lambda measure: measure.ratio)


# 80 columns.
_ROW = " {:15} {:14}  {:14}  {:14}  {}"
_HEADER = _ROW.format("", "stage, typical", "stage, largest", "logits", "against prefill")


def _row(route: Route) -> str:
    stages = [nearest_limit(errors) if errors else None for errors in (route.typical, route.largest)]
    cells = [
        f"{each.value:.1e} {each.ratio:>4.0%}" if each else ""
        for each in (*stages, route.logits, route.against_prefill)
    ]
    return _ROW.format(route.name, *cells).rstrip()
