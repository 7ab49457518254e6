"""The ranks of one worker: how they meet, what they are told, and who is at fault when one fails."""
