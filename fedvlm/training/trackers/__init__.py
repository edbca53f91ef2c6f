"""Experiment trackers that a run's rounds are also written to (log=): one file each, imported only where asked for."""
