"""Qwen3 and Qwen3-MoE with their MTP head, readable for a single device, and loading from a Hugging Face directory."""
