"""Checkpoints of every source, as the exporter's tests write them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "export"))
sys.path.append(str(Path(__file__).parents[1] / "model"))
