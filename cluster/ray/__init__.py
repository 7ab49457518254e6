"""The Ray layer of a deployment: sessions, actors, certificates."""
