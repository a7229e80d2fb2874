"""safetensors files: a single one, a Hugging Face directory with an index, or a directory of shards."""
