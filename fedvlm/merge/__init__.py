"""What the server does with the replies. One file, one rule."""
