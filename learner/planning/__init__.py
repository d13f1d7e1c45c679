"""What a rank takes of its GPU, by arithmetic before any weights are loaded, and which layout fits."""
