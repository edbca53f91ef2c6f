"""The towers of a CLIP as functions of small learned changes."""
