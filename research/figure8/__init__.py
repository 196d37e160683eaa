"""Figure 8 over trainings whose protocol was written before they began: see protocol.md and runs.md."""
