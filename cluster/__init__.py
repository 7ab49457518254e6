"""Starting and watching a deployment: CLI, placement on Ray, supervision, diagnosis."""
