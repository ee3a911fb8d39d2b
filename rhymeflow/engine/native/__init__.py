"""The native engine: a Hugging Face model in this process, on one device."""
