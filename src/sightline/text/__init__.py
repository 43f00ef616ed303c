"""Text in, token ids out, and back: tokenizers, chat templates and incremental detokenization.

Knows nothing of models, tensors or requests.
"""
