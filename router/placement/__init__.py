"""Which workers serve a request: who is alive, what they hold, what each way would cost."""
