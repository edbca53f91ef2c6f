"""Engines whose clients are other processes; found by name, as those in fedvlm/engines."""
