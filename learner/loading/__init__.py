"""From files to a policy: which tensors make up a parameter, how a rank reads its rows of them, and tokenizers."""
