"""The machine: files, paths, processes, devices, time, the screen, and what the user allowed here."""
