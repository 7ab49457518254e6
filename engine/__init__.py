"""The engine: scheduling, steps, sampling, verification and ranks of one worker; no Ray."""
