"""The papers' tables: manifests (what a table holds), what a user's data and backbone are, runs, and ours beside theirs."""
