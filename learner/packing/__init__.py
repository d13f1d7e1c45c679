"""Many sequences in few rows: their cells, micro-batches, how they attend, and in which ways a model may be asked."""
