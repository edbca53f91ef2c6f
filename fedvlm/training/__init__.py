"""Runs: planned, trained, recorded in a folder, several at a time, here or on other machines."""
