"""What a run keeps on disk: checkpoints, the journal, terms, and the finished model."""
