"""Finished runs in use: predictions, further questions, exports."""
