"""From the ranks or files that have the state to those that lack it."""
