"""When a rank takes its snapshots, and who keeps them."""
