"""How a client turns its data into a reply. One file, one rule."""
