"""How a model is divided over ranks: sharded (FSDP), by sequence length, by experts, and by heads and width."""
