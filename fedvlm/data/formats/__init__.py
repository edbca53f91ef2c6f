"""The formats of data, one file each (fedvlm/data/format.py says what one is)."""
