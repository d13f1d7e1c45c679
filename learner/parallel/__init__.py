"""How a model lies over ranks: sharded (FSDP), by the length of samples, by experts, by heads and width; and what one
rank holds of it."""
