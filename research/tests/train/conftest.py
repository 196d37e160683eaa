"""The trainer is a program; its modules import one another by their bare names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "train"))
