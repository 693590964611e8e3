"""Any text or vision-language model that transformers or vLLM can compute, as a thinker alone."""
