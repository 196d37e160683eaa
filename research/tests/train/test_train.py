"""The trainer: what it repeats, what it resumes, what it matches, and that it learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import diffquant
from diffquant import data
from diffquant.errors import NonFiniteError, OutputExistsError, UsageError
from diffquant.measure.protocols import needle
from diffquant.model.attention import apply_rotary_embedding
from diffquant.support.program import run_program
from research.train import train as program
from research.train.loop import CHECKPOINT, LOG, Trainer
from research.train.models import CONTROLS, KINDS, NO_NORM, matched
from research.train.needles import Needles
from research.train.prose import Prose
from research.train.settings import Schedule, Settings, Sizes

RECIPES = Path(program.__file__).parent
SIZES = Sizes(hidden=32, layers=2, heads=4, head_dim=8, inner=80, context=128, init=0.1, bias=True, theta=10000.0)
SCHEDULE = Schedule(steps=12, warmup=3, tokens=128, lengths=((0.0, 32), (0.5, 64)), rate=3e-3, accumulate=2)
PROSE = {"vocabulary": 300, "sample": 20000}
SETTINGS = Settings("prose", SIZES, SCHEDULE, PROSE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "books.txt"
    file.write_text(data.books_text()[:60000])
    return file


@pytest.fixture(scope="module")
def prose(text):
    return Prose(text.read_text(), SIZES.context, **PROSE)


def trainer(prose, kind="diff-v1", schedule=SCHEDULE):
    settings = replace(SETTINGS, schedule=schedule)
    return Trainer(program.new_model(settings, kind, len(prose.tokenizer), "cpu"), schedule, compiled=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_interrupted_and_resumed_ends_bit_identical(prose, kind, tmp_path):
    whole = trainer(prose, kind)
    whole.train(prose, tmp_path)
    (tmp_path / "parts").mkdir()
    trainer(prose, kind).train(prose, tmp_path / "parts", until=5, every=5)
    resumed = trainer(prose, kind)
    assert resumed.resume(tmp_path / "parts")
    assert resumed.step == 5
    resumed.train(prose, tmp_path / "parts")
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_accumulated_micro_batches_make_the_step_of_one_batch(prose, tmp_path):
    one = trainer(prose, schedule=replace(SCHEDULE, tokens=256, accumulate=1, lengths=((0.0, 32),)))
    two = trainer(prose, schedule=replace(SCHEDULE, tokens=128, accumulate=2, lengths=((0.0, 32),)))
    one.train(prose, tmp_path, until=1)
    two.train(prose, tmp_path, until=1)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_the_optimizer_is_pytorchs_adamw_on_the_schedules_rate(prose, tmp_path):
    ours = trainer(prose, schedule=replace(SCHEDULE, accumulate=1, clip=1e9, decay=0.0))
    model = program.new_model(SETTINGS, "diff-v1", len(prose.tokenizer), "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), betas=SCHEDULE.betas, weight_decay=0.0)
    for step in range(4):
        ids, _ = prose.batch(0, step, 4, 32)
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.learning_rate(step)
        optimizer.zero_grad()
        model(ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous()).loss.backward()
        optimizer.step()
    ours.train(prose, tmp_path, until=4)
    for (name, a), b in zip(model.named_parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(prose, kind, tmp_path):
    toy = trainer(prose, kind, replace(SCHEDULE, steps=60, tokens=512, accumulate=1))
    toy.train(prose, tmp_path, every=10)
    losses = [json.loads(line)["loss"] for line in (tmp_path / LOG).read_text().splitlines()]
    # A uniform guess costs 5.7.
    assert losses[0] > 5.2
    assert losses[-1] < 4.9


def test_the_rate_warms_up_and_falls_linearly():
    schedule = replace(SCHEDULE, steps=100, warmup=10, rate=1.0, final=0.04)
    rates = [schedule.learning_rate(step) for step in range(100)]
    assert rates[:2] == [0.1, 0.2]
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.04)
    assert rates[55] - rates[54] == pytest.approx(rates[99] - rates[98])


@pytest.mark.parametrize("recipe", ["needle.yaml", "prose.yaml"])
def test_parameters_match_within_one_percent(recipe):
    settings = Settings.read(RECIPES / recipe)
    counts = [program.new_model(settings, kind, 1000, "cpu").num_parameters() for kind in (*KINDS, *CONTROLS, NO_NORM)]
    assert max(counts) / min(counts) < 1.01


@pytest.mark.parametrize("kind", [*KINDS, *CONTROLS])
def test_first_maps_look_one_and_two_tokens_back(kind):
    settings = replace(SETTINGS, model=replace(SIZES, head_dim=16, look_back=True))
    model = program.new_model(settings, kind, 100, "cpu")
    attention, hidden = model.attention_modules[0], torch.randn(1, 20, SIZES.hidden)
    spec, rotary = attention.spec, model.model.rotary_emb(hidden, position_ids=torch.arange(20)[None])
    q = apply_rotary_embedding(attention.layout.view_queries(attention.q_proj(hidden)), rotary, "half")
    k = apply_rotary_embedding(attention.layout.view_keys(attention.k_proj(hidden)), rotary, "half")
    for pair, distance in enumerate((1, 2)):
        weights = (q[0, pair, 19] @ k[0, pair].T * spec.scale).softmax(-1)
        assert weights.argmax() == 19 - distance
        assert weights[19 - distance] > 0.7


def test_v1_has_half_the_heads_and_v2_all_of_them():
    transformer, v1, v2 = (matched(kind, SIZES, 100).diff_spec for kind in KINDS)
    assert (transformer.pairs, v1.pairs, v2.pairs) == (4, 2, 4)
    assert (v1.value_dim, v2.value_dim, v2.query_heads) == (16, 8, 8)
    for kind in ("diff-v1", *CONTROLS, NO_NORM):
        with pytest.raises(UsageError, match="even number"):
            matched(kind, replace(SIZES, heads=3), 100)


def test_the_controls_are_v1_with_one_map_as_wide_as_its_values():
    v1, wide, normed, bare = (matched(kind, SIZES, 100).diff_spec for kind in ("diff-v1", *CONTROLS, NO_NORM))
    assert normed == replace(v1, maps=1, lam="none", head_dim=v1.value_dim)
    assert wide == replace(normed, post_norm="none", scale_by_init=False)
    assert bare == replace(v1, post_norm="none", scale_by_init=False)


def test_batches_depend_on_seed_and_step_alone(text, prose):
    again = Prose(text.read_text(), SIZES.context, **PROSE)
    needles = needle_source()
    for source, twin in ((prose, again), (needles, needle_source())):
        for step in (7, 2):
            ids, weights = source.batch(3, step, 4, 64)
            torch.testing.assert_close(twin.batch(3, step, 4, 64), (ids, weights), rtol=0, atol=0)
        assert not torch.equal(source.batch(3, 2, 4, 64)[0], source.batch(4, 2, 4, 64)[0])


def test_prose_is_read_once_before_any_is_read_again(prose):
    length, rows = 64, 3
    windows = prose.describe()["tokens"] // length
    batches = [prose.batch(0, step, rows, length)[0][:, 1:] for step in range(-(-windows // rows))]
    seen = {tuple(row.tolist()) for row in torch.cat(batches)[:windows]}
    assert len(seen) == windows


def needle_source():
    recipe = Settings.read(RECIPES / "needle.yaml").data
    # The books that ship are short: more words, so that enough sentences consist of them.
    return Needles(data.books_text(), SIZES.context, **(recipe | {"frequent": 1500}))


def test_the_seed_given_is_the_runs():
    assert Settings.read(RECIPES / "needle.yaml").schedule.seed == 0
    assert Settings.read(RECIPES / "needle.yaml", seed=1).schedule.seed == 1


def test_a_needle_sequence_answers_what_it_told_in_the_evaluations_words():
    source = needle_source()
    ids, weights = source.batch(0, 10**6, 16, 128)
    for row, weight in zip(ids, weights, strict=True):
        said = source.tokenizer.decode(row)
        answers = row[1:][weight > weight.min()]
        assert len(answers)
        for place in (weight > weight.min()).nonzero().flatten().tolist():
            city, number = source.tokenizer.decode(row[place - 1]), source.tokenizer.decode(row[place + 1])
            assert said.count(f"the magic number for {city} is {number}") >= 2
    item = needle.make_items(source.tokenizer, data.books_text(), needle.NeedlePlan(lengths=(128,), samples=1))[0]
    assert source.tokenizer.unk_token_id not in source.tokenizer.encode("".join(item.query_texts()[0]))


@pytest.mark.parametrize(("step", "most"), [(0, 4), (599, 4), (1300, 38), (2000, 71), (5000, 71)])
def test_the_cities_of_needle_sequences_grow_from_four_to_all(step, most):
    source = needle_source()
    ids, _ = source.batch(0, step, 400, 32)
    known, every = (
        {source.tokenizer.convert_tokens_to_ids(city.lower()) for city in cities}
        for cities in (needle.CITIES[:most], needle.CITIES)
    )
    assert every.intersection(ids.flatten().tolist()) == known


def test_the_program_trains_resumes_and_writes_a_checkpoint_that_loads(text, tmp_path):
    settings = replace(SETTINGS, schedule=replace(SCHEDULE, steps=4))
    program.train(settings, "diff-v2", text, tmp_path / "run")
    first = diffquant.load(tmp_path / "run")
    assert first.dtype == torch.bfloat16
    assert diffquant.load_tokenizer(tmp_path / "run").encode("It was.")[0] == 0
    program.train(settings, "diff-v2", text, tmp_path / "run")
    for a, b in zip(first.parameters(), diffquant.load(tmp_path / "run").parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UsageError, match="another output"):
        program.train(settings, "diff-v1", text, tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(OutputExistsError, match="no training run"):
        program.train(settings, "diff-v1", text, tmp_path / "other")


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_checkpoint(prose, tmp_path):
    broken = trainer(prose)
    broken.train(prose, tmp_path, until=2)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="learning rate"):
        broken.train(prose, tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1", "must hold source"),
        ("source: a\nmodel: {}\nschedule: {}\ndata: {}", "sizes"),
        ("source: a\nmodel: {depth: 2}\nschedule: {}\ndata: {}", "unknown keys depth"),
        ("{", "cannot read settings"),
    ],
)
def test_bad_settings_are_one_clear_error(tmp_path, content, message):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(UsageError, match=message):
        Settings.read(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [("", [], "is empty"), ("Too short.", [], "fewer than a window"), ("Too short.", ["--steps", "0"], "0 steps")],
)
def test_a_run_that_cannot_be_leaves_no_folder(content, options, message, tmp_path, monkeypatch, capsys):
    book, output = tmp_path / "text.txt", tmp_path / "out"
    book.write_text(content)
    command = [RECIPES / "prose.yaml", "--kind", "diff-v2", "--text", book, "--output", output, *options]
    monkeypatch.setattr("sys.argv", ["train.py", *map(str, command)])
    with pytest.raises(SystemExit) as stop:
        run_program(program.main)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not output.exists()
