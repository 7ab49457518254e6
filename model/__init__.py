"""Llama, Mistral and Qwen models and the MTP head, readable for one device, cut over ranks from outside; loading."""
