"""Make a federation of images: find them, assign them to clients, split them, and encode them with the frozen model."""
