"""From groups to a step: the reference, a teacher, the loss and its gradients, the optimizer."""
