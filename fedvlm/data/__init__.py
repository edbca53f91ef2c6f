"""From images to a federation: where they are, who holds them, how they are split, what the frozen model sees."""
