"""Worker processes: their environment, zygote, forks, exits, stacks, and what the node lacks for them."""
