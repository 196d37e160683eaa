"""Sweeps over bit widths: `run.run_sweep` measures, `outputs.write_outputs` tabulates, plots and reports."""
