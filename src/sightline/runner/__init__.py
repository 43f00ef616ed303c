"""From rows to logits to tokens: assembling batches, running forwards, sampling; and the composition root."""
