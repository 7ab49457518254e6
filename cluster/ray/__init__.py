"""Ray beneath a deployment: sessions, actors, certificates."""
