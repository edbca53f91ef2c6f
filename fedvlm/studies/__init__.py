"""Several runs with one question: benches and sweeps."""
