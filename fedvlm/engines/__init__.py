"""Engines carry a step to the clients: many side by side (stacked), one by one (serial), or in several processes."""
