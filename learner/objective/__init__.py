"""From groups to an optimizer step: the reference, a teacher, the loss and its gradients, the optimizer."""
