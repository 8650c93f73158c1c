"""What the command line runs: train, study, bench, simulate, plan, advise, report. The library never imports it."""
