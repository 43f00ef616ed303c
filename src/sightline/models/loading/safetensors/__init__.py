"""Models in Hugging Face folders of safetensors files."""
