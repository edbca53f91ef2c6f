"""Turn what a user gives (keys, recipes, files) into the setup of a run."""
