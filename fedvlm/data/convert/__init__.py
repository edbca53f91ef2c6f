"""Data in other projects' formats, as folders and files that `data=` takes."""
