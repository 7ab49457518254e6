"""Access control: who may call, and how much each caller may use."""
