"""Adapters: what is trained, which of it is private, and how it computes logits. One parameterisation per file."""
