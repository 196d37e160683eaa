"""Tables, plots and pages that sweeps, calibration and the bench share."""
