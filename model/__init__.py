"""Qwen3 and Qwen3-MoE with their MTP head, readable for one device, cut over ranks from outside; and loading."""
