"""What leaves a client beside parameters and numbers, and what can be made of it."""
