"""The command line of diffquant with these tasks beside its own, which `register` makes known."""

from diffquant.__main__ import main
from diffquant.measure.tasks import register
from examples.shots.many_shot import ManyShot
from examples.shots.nll import Nll
from examples.shots.shot_order import ShotOrder

if __name__ == "__main__":
    for task in (ManyShot, ShotOrder, Nll):
        register(task)
    main()
