"""Process groups: forming, aborting; DDP, and how gradients are averaged."""
