"""Local rules: how a client trains on its data, and what it replies. One rule per file."""
