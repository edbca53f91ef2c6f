"""What is trained, what of it is private, how it makes logits. One file, one parameterisation."""
