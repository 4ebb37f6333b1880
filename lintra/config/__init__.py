"""The fields of configurations, and folders as lists of choices."""
