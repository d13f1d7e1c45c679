"""From files to a policy: which tensors a parameter is made of, how a rank reads its rows of them, and tokenizers."""
