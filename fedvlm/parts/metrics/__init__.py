"""How good a model is. One file, one metric; a metric of your own is a file, too (metrics=path.py)."""
