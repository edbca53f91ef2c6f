"""What came of it: views (shared, personal, newcomer) and protocols (leave-one-domain-out)."""
