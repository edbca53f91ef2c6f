"""What is done with a finished run: predictions, further questions, exports."""
