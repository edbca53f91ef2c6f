"""Several runs with one question: benches, sweeps, the tables of papers, an attack."""
