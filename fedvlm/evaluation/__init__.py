"""Scores of a round: views (shared, personal, newcomer) and protocols (leave-one-domain-out, base-to-novel)."""
