"""The model and its arithmetic: loading, packing, attention, log-probs, gradients, the optimizer."""
