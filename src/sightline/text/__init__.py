"""Text in, token ids out, and back: tokenizers, chat templates and incremental detokenization.

Does not know models, tensors or requests.
"""
