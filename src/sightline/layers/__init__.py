"""The pieces that models are made of. Plain objects over tensors: inference needs no module tree."""
