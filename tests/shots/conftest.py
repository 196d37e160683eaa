import pytest

from diffquant.measure import tasks
from examples.shots.many_shot import ManyShot
from examples.shots.nll import Nll
from examples.shots.shot_order import ShotOrder


@pytest.fixture(autouse=True)
def _shots_are_known(monkeypatch):
    """All tasks in a registry that is put back."""
    tasks.task_kinds()
    monkeypatch.setattr(tasks, "_KINDS", dict(tasks._KINDS))
    for task in (ManyShot, ShotOrder, Nll):
        tasks.register(task)
