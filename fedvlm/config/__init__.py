"""From what a user gives (keys, recipes, files) to the setup of a run."""
