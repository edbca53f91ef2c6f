"""Merges: what the server does with the clients' replies. One merge per file."""
