"""Readers of the data sets of tasks: where their files are, what they hold and how it is split."""
