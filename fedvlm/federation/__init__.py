"""A federation across machines, on NVFlare: kits, processes, and what runs in them."""
