"""A method in a round: what the server asks, what clients answer, and what the server accepts."""
