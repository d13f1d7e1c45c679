"""What a run keeps on disk: checkpoints, the journal, epochs, and the finished model."""
