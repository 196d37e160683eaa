"""Engines: any order gives the same cells, and what an engine is given can be sent elsewhere."""

import pickle
from dataclasses import replace

import pytest

from diffquant.sweep import SweepOptions, engines, run_sweep
from diffquant.sweep.engines.local import measure_job
from tests.support import tiny_lm

OPTIONS = SweepOptions(
    tasks=("hellaswag", "perplexity"),
    bits=(16, 4),
    targets=("logits", "weights"),
    granularities=("row",),
    task_options={"limit": 4, "characters": 500, "window": 64, "stride": 32},
    dtype="float32",
)


class Backwards:
    """Runs the last cell first, each in a session of its own."""

    def run(self, batches, recorder):
        for batch in reversed(batches):
            for job in reversed(batch.jobs):
                session = batch.subject.open()
                recorder.done(job, measure_job(session, job, recorder.progress_of(job)))


class Elsewhere:
    """Sends every batch away and takes outcomes back, as bytes."""

    def run(self, batches, recorder):
        for batch in batches:
            sent = pickle.loads(pickle.dumps(batch))
            assert sent.subject.source is not batch.subject.source
            session = sent.subject.open()
            for job, there in zip(batch.jobs, sent.jobs, strict=True):
                outcome = measure_job(session, there, lambda *_: None)
                recorder.done(job, pickle.loads(pickle.dumps(outcome)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("models") / "diff-v2")


@pytest.fixture
def names(monkeypatch):
    engines.engine_named("local")
    monkeypatch.setattr(engines, "_ENGINES", dict(engines._ENGINES))
    engines.register("backwards", Backwards)
    engines.register("elsewhere", Elsewhere)
    with pytest.raises(ValueError, match="registered twice"):
        engines.register("backwards", Backwards)
    return ("local", "backwards", "elsewhere")


def test_every_engine_gives_the_same_cells(model, names, tmp_path):
    results = {name: run_sweep([model], OPTIONS, tmp_path / name, engine=name) for name in names}
    cells = {}
    for name, result in results.items():
        result.require_complete()
        cells[name] = [(c.point.label, c.task, replace(c.measurement, seconds=0)) for c in result.cells]
    assert cells["backwards"] == cells["local"]
    assert cells["elsewhere"] == cells["local"]
    files = [{file.name for file in (tmp_path / name / "cells").iterdir()} for name in names]
    assert files[0] == files[1] == files[2]


def test_a_batch_holds_the_cells_of_one_set_of_weights(model, monkeypatch, tmp_path):
    engines.engine_named("local")
    monkeypatch.setattr(engines, "_ENGINES", dict(engines._ENGINES))
    seen = []

    class Watching(engines._ENGINES["local"]):
        def run(self, batches, recorder):
            seen.extend(batches)
            super().run(batches, recorder)

    engines.register("watching", Watching)
    run_sweep([model], OPTIONS, tmp_path, engine="watching")
    weights = [[str(job.point.recipe.weights) for job in batch.jobs] for batch in seen]
    assert weights == [["16"] * 4, ["4:row"] * 2]
    assert seen[0].subject is seen[1].subject
