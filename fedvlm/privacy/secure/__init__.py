"""Secure aggregation: the server learns the sum of what clients send, and nothing else of it (docs/secure.md).

Bonawitz et al., CCS 2017: each client adds masks to its vector that cancel in the sum. One is shared with each neighbour
(`+` for one of the two, `−` for the other), one is its own; secret shares at its neighbours let the server remove the
masks of clients that dropped out, and the own masks of those that did not, never both of one client. Bell et al., CCS 2020
(SecAgg+): with many clients, a few random neighbours are enough.

`fixed.py` turns numbers into integers and back, `client.py` and `server.py` are the two sides of the four exchanges.
"""
