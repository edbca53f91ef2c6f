"""How a step reaches clients: many side by side in one process (stacked), one by one (serial), or each in a process of its
own with nothing but bytes between (loopback). One file, one engine."""
