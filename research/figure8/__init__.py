"""Figure 8 over trainings whose protocol was written before they began: see protocol.md and runs.md."""

import sys
from pathlib import Path

# The trainer is a program among the examples; its modules import one another by their bare names.
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
