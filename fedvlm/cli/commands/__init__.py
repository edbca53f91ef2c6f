"""What each command of the command line does: one file, one verb, a thin layer over fedvlm.api."""
